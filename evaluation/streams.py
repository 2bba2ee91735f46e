"""One model over one sequence, fed by hand: its cache, the logits of the newest token, what it stored and how long it took."""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvstitch.evaluation.kept_bytes import KeptBytes
from kvstitch.evaluation.metrics import NonFiniteLogits


@dataclass
class Storage:
    """What a stream stored after its prompt, measured after every forward.

    Args:
        slots_summed: stored slots, summed over the tokens that attended to them.
        bytes_summed: bytes of storage behind keys and values, summed over the same tokens.
        tokens: how many tokens that were.
        peak_slots: most slots in any layer at any time, the prompt included.
        peak_bytes: most bytes of storage behind keys and values at any time, the prompt included.
        peak_auxiliary_bytes: most bytes beside them, looked at when the cache has new storage.
        kept: what of it is attended to, measured along with it; None leaves that out.
    """

    slots_summed: float = 0.0
    bytes_summed: float = 0.0
    tokens: int = 0
    peak_slots: int = 0
    peak_bytes: int = 0
    peak_auxiliary_bytes: int = 0
    kept: KeptBytes | None = None
    _last_bytes: int = -1

    @property
    def mean_slots(self) -> float | None:
        """Slots per kv head that a token attends to, averaged over layers and over the tokens after the prompt."""
        return self.slots_summed / self.tokens if self.tokens else None

    @property
    def mean_bytes(self) -> float | None:
        """Bytes of storage while a token after the prompt attends, averaged over them; room for growth included."""
        return self.bytes_summed / self.tokens if self.tokens else None

    def measure(self, cache: Cache, tokens: int) -> None:
        """Take in what the cache stores after a forward of `tokens` tokens; 0 for the prompt's."""
        lengths = stored_slots(cache)
        # The tokens of a chunk enter together, but each sees only those before it, as when they come one at a time.
        self.slots_summed += tokens * (sum(lengths) / len(lengths) - (tokens - 1) / 2)
        self.tokens += tokens
        self.peak_slots = max(self.peak_slots, *lengths)
        stored = stored_bytes(cache)
        self.bytes_summed += tokens * stored - _arriving_bytes(cache, tokens)
        if stored != self._last_bytes:
            # Little changes beside keys and values while they stay where they are, and looking takes milliseconds.
            self._last_bytes = stored
            self.peak_auxiliary_bytes = max(self.peak_auxiliary_bytes, auxiliary_bytes(cache))
        self.peak_bytes = max(self.peak_bytes, stored)
        if self.kept is not None:
            self.kept.measure(cache, tokens)

    def note_peaks(self, cache: Cache) -> None:
        """Take in what a cache stores in the middle of a forward, when later layers may be empty yet."""
        filled = [layer for layer in cache.layers if layer.is_initialized]
        if filled:
            self.peak_slots = max(self.peak_slots, *(layer.keys.shape[2] for layer in filled))
            stored = sum(part.untyped_storage().nbytes() for layer in filled for part in (layer.keys, layer.values))
            self.peak_bytes = max(self.peak_bytes, stored)


@dataclass
class Stream:
    """A sequence of batch 1 in the making. Whoever feeds it decides whether a press is at work on the model.

    Args:
        model: in eval mode.
        seconds: wall time of all forwards so far, events included.
        storage: what was stored.
    """

    model: PreTrainedModel
    seconds: float = 0.0
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self):
        self.cache: Cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        self._last: Tensor | None = None

    @torch.no_grad()
    def prefill(self, token_ids: Sequence[int]) -> None:
        """Feed the prompt; only its last logits are kept."""
        self._forward(token_ids, logits_to_keep=1)
        self.storage.measure(self.cache, tokens=0)

    @torch.no_grad()
    def feed(self, token_ids: Sequence[int]) -> Float[Tensor, "N V"]:
        """Append known tokens; returns the logits after each of them."""
        logits = self._forward(token_ids)
        self.storage.measure(self.cache, tokens=len(token_ids))
        return logits

    def ends_in_nan(self) -> bool:
        """Whether the newest logits hold NaN."""
        return bool(self._last.isnan().any())

    def greedy(self, max_new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
        """Decode until a stop token (left out) or `max_new_tokens`, most likely token first.

        Raises:
            NonFiniteLogits: NaN instead of a prediction.
        """
        tokens: list[int] = []
        while True:
            if self.ends_in_nan():
                raise NonFiniteLogits(f"the logits after {len(tokens)} decoded tokens hold NaN")
            token = int(self._last.argmax())
            if token in stop_ids:
                return tokens
            tokens.append(token)
            if len(tokens) == max_new_tokens:
                return tokens
            self.feed([token])

    @torch.no_grad()
    def time_steps(self, count: int, left_out: Callable[[], float] = float) -> float:
        """Seconds of `count` greedy single-token forwards, after one that is not timed; nothing is read back in between.

        Args:
            count: at least 1.
            left_out: seconds so far of what does not count, such as events; what it grows by in those forwards is taken off.
        """
        token = self._last.argmax().view(1, 1)
        start = before = 0.0
        for step in range(count + 1):
            if step == 1:
                # An event may fall into the forward that is not timed.
                start, before = now(self.model.device), left_out()
            logits = self.model(input_ids=token, past_key_values=self.cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
        return now(self.model.device) - start - (left_out() - before)

    @contextmanager
    def branch(self, shared: object) -> Iterator["Stream"]:
        """A stream that goes on from here on a copy of the cache; its storage counts here, its tokens do not.

        Args:
            shared: the press, which the copied cache must recognise as its own.
        """
        other = Stream(self.model, storage=self.storage)
        other.cache = copy.deepcopy(self.cache, {id(shared): shared})
        other._last = self._last
        yield other
        self.seconds += other.seconds

    def _forward(self, token_ids: Sequence[int], **options) -> Float[Tensor, "N V"]:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        start = now(self.model.device)
        logits = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **options).logits[0]
        self.seconds += now(self.model.device) - start
        self._last = logits[-1]
        return logits


def stored_slots(cache: Cache) -> list[int]:
    """Slots stored in each layer."""
    return [layer.keys.shape[2] for layer in cache.layers]


def stored_bytes(cache: Cache) -> int:
    """Bytes of the storage behind all keys and values, measured, room for growth included."""
    return sum(part.untyped_storage().nbytes() for layer in cache.layers for part in (layer.keys, layer.values))


def _arriving_bytes(cache: Cache, tokens: int) -> float:
    """By how much stock caches, which grow token by token, were smaller while the tokens of a chunk came, summed over them.

    Compressed layers have their room for the tokens to come from the first of them on.
    """
    grown = [layer for layer in cache.layers if not type(layer).__module__.startswith("kvstitch.")]
    per_slot = sum(part.nbytes / part.shape[2] for layer in grown for part in (layer.keys, layer.values))
    return per_slot * tokens * (tokens - 1) / 2


def auxiliary_bytes(cache: Cache) -> int:
    """Bytes that compressed layers hold beside keys and values: positions, query memory, credit, indices; 0 for stock caches.

    Measured: every distinct storage that can be reached from the layers, the press itself left out.
    """
    layers = [layer for layer in cache.layers if type(layer).__module__.startswith("kvstitch.")]
    stored = {part.untyped_storage().data_ptr() for layer in layers for part in (layer.keys, layer.values)}
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[object] = [{name: part for name, part in vars(layer).items() if name != "owner"} for layer in layers]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            if storage.data_ptr() not in stored:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray):
            while isinstance(item.base, np.ndarray):
                item = item.base
            found[item.ctypes.data] = item.nbytes
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | deque):
            waiting += item
        elif type(item).__module__.startswith("kvstitch.") and hasattr(item, "__dict__"):
            waiting += vars(item).values()
    return sum(found.values())


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, once all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
