"""Eviction: what is not kept is given back, every `interval` decoded tokens."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstitch.allocators import EvictingAllocator
from kvstitch.presses.budget import Budget
from kvstitch.presses.cache import Request, StitchLayer
from kvstitch.presses.events import CompactionEvent, LayerEvent
from kvstitch.presses.run import Run
from kvstitch.scorers import Scorer
from kvstitch.views import LayerView

# One reallocation an interval, but a long interval must not reserve memory that may never be used.
_MOST_GROWTH_TOKENS = 512


@dataclass(frozen=True)
class EvictionPress:
    """Compacts the cache to a budget while the model decodes; nothing evicted comes back.

    `with press(model) as run: model.generate(...)` needs nothing else. Between compactions the cache grows by one slot a
    token, so it holds at most `budget + interval` slots after the first one. A forward of several tokens (a second turn,
    teacher-forced text) adds all of them before the next compaction.

    Args:
        scorer: which tokens matter.
        allocator: how many, where; its `num_sinks` and `num_recent` protected slots count inside the budget.
        budget: tokens per kv head (256), kept fraction (0.25) or bytes ("64MiB"); see `Budget`.
        interval: decoded tokens between compactions.
        compress_prompt: compact once more when the prompt is complete, before the first decoded token enters.
        record_events: keep what each compaction kept in `run.events` (a few hundred bytes per kept slot and layer).
        on_event: called with each `CompactionEvent`.
    """

    scorer: Scorer
    allocator: EvictingAllocator
    budget: Budget | int | float | str
    interval: int = 512
    compress_prompt: bool = False
    # Who watches does not change what is done, so a cache stays with a press that differs in these only.
    record_events: bool = field(default=True, compare=False)
    on_event: Callable[[CompactionEvent], None] | None = field(default=None, compare=False)

    def __post_init__(self):
        _require_type("scorer", self.scorer, Scorer)
        _require_type("allocator", self.allocator, EvictingAllocator)
        object.__setattr__(self, "budget", Budget.of(self.budget))
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ValueError(f"`interval` must be a positive number of tokens, got {self.interval!r}")
        for name in ("compress_prompt", "record_events"):
            _require_type(name, getattr(self, name), bool)
        self.budget.require_at_least(self.allocator.num_sinks + 1)
        if self.budget.tokens is not None:
            self.warn_if_protected_fill(self.budget.tokens)

    def warn_if_protected_fill(self, slots: int) -> None:
        """Say that sinks and recent tokens leave no slot to be chosen."""
        if slots <= self.allocator.num_sinks + self.allocator.num_recent:
            warnings.warn(
                f"the {self.allocator.num_sinks} sinks and {self.allocator.num_recent} recent tokens that are always kept fill "
                f"the {slots} slots of `budget`={self.budget}, so no score decides anything: raise `budget` or lower the "
                "allocator's `num_recent`",
                stacklevel=4,
            )

    def __call__(self, model: PreTrainedModel) -> "EvictionRun":
        """A context manager; its value is the run.

        Raises:
            UnsupportedModel: the model has something that the press would get wrong, with the reason.
        """
        return EvictionRun(self, model)


class EvictionRun(Run):
    """An `EvictionPress` at work; `events` tells what each compaction kept."""

    def __init__(self, press: EvictionPress, model: PreTrainedModel):
        growth_tokens = min(press.interval, _MOST_GROWTH_TOKENS)
        super().__init__(press, model, press.scorer.needs | press.allocator.needs, growth_tokens)
        press.scorer.check_model(
            self._facts.rotary,
            self._facts.num_layers,
            self._facts.num_query_heads,
            self._facts.num_kv_heads,
            self._facts.head_dim,
        )
        if press.budget.bytes is not None and self._facts.slot_bytes is not None:
            # Known before anything runs, so that a budget in bytes that buys nothing fails here and not while decoding.
            seen, cost = torch.zeros(1, dtype=torch.int64), sum(self._facts.slot_bytes.values())
            press.warn_if_protected_fill(int(press.budget.slots(seen, cost, press.allocator.num_sinks + 1)))
        if self._facts.num_sliding_layers:
            warnings.warn(
                f"{self._facts.num_sliding_layers} of {self._facts.num_layers} layers of {type(model).__name__} have a sliding "
                "window: they keep transformers' own cache and are left alone",
                stacklevel=3,
            )
        self.events: list[CompactionEvent] = []
        self.num_events = 0
        self.event_seconds = 0.0
        self._said_nan = False

    @property
    def bound(self) -> bool:
        """Whether the budget ever made the press evict something."""
        return self.num_events > 0

    def compact(self) -> None:
        """Compact the cache that went through the model last, now.

        Nothing happens while everything fits, or while no query has gone by that the scorer could ask; rows about which
        the scorer knows too little (`Scorer.waits`) are passed over.
        """
        self._compact(self._request(), "request")

    def before_tokens(self, request: Request, count: int) -> None:
        if not request.in_prefill and self.seen_tokens - request.counted_from >= self.press.interval:
            self._compact(request, "interval")

    def after_prefill(self, request: Request) -> None:
        if self.press.compress_prompt:
            self._compact(request, "prompt")

    @torch.no_grad()
    def _compact(self, request: Request, reason: str) -> None:
        layers = self.layers
        first = next(iter(layers.values()))
        if not first.length or not first.query_memory.ready:
            # Not ready: a cache that came from elsewhere. The queries that scores ask for begin with the next token.
            return
        request.counted_from = self.seen_tokens
        keep = self._keep(list(layers.values()))
        held = _held(list(layers.values()))
        left_alone = held.amax(dim=0) <= keep
        if not bool(left_alone.all()):
            # Passed over and not asked again before the next event, or a row would not do in a batch what it does alone.
            left_alone = left_alone | self._waiting()
        if bool(left_alone.all()):
            return
        due = {}
        # By rank among the layers that share the budget: sliding-window layers have none.
        keeps = self.press.allocator.layer_keeps(keep, held)
        for layer_keep, (index, layer) in zip(keeps, layers.items()):
            # A row that fits or waits is left alone in every layer, whatever its neighbours in the batch make due.
            layer_keep = torch.where(left_alone, layer_keep.clamp(min=layer.length), layer_keep)
            if layer.length > int(layer_keep.min()):
                due[index] = (layer, layer_keep)
        if not due:
            return
        events = self._compact_layers(due)
        event = CompactionEvent(request.num_events, self.seen_tokens, reason, tuple(events))
        request.num_events += 1
        self.num_events += 1
        self.event_seconds += event.seconds
        if self.press.record_events:
            self.events.append(event)
        if self.press.on_event is not None:
            self.press.on_event(event)

    def _waiting(self) -> Tensor | bool:
        """`[B]` rows about which the scorer knows too little, on the CPU; False if it never does."""
        waiting = self.press.scorer.waits(self._view(*next(iter(self.layers.items()))))
        return False if waiting is None else waiting.cpu()

    def _view(self, index: int, layer: StitchLayer) -> LayerView:
        return layer.view(self._facts.attention[index].scaling, self._facts.rotary, index, self._facts.num_layers)

    def _compact_layers(self, due: dict[int, tuple[StitchLayer, Tensor]]) -> list[LayerEvent]:
        """Score and allocate all layers before any is touched: budgets may compare layers, and small operators stack."""
        start = time.perf_counter()
        views, scores = [], []
        for index, (layer, _) in due.items():
            views.append(self._view(index, layer))
            scores.append(self.press.scorer.score(views[-1]))
            self._check_scores(scores[-1], views[-1].valid)
        layers, keeps = [layer for layer, _ in due.values()], [keep for _, keep in due.values()]
        selections = self.press.allocator.allocate_layers(views, scores, keeps, [layer.slot_state for layer in layers])
        shared_seconds = (time.perf_counter() - start) / len(due)
        events = []
        for layer, selection in zip(layers, selections):
            _check_slots(self.press.allocator, selection.slots, layer.length)
        for index, layer, selection in zip(due, layers, selections):
            start, before = time.perf_counter(), layer.length
            layer.keep(selection.slots, selection.state, selection.hidden)
            seconds = shared_seconds + time.perf_counter() - start
            events.append(
                LayerEvent(index, before, layer.length, selection.slots, layer.positions, selection.details, seconds)
            )
        return events

    def _check_scores(self, scores: Tensor, valid: Tensor) -> None:
        name = type(self.press.scorer).__name__
        if scores.shape != valid.shape or scores.dtype != torch.float32:
            raise TypeError(
                f"{name}.score must return float32 {tuple(valid.shape)} [B, H, T], got {scores.dtype} {tuple(scores.shape)}"
            )
        if not self._said_nan and bool((scores.isnan() & valid).any()):
            self._said_nan = True
            warnings.warn(f"{name} scored some tokens NaN; they count as the worst ones", stacklevel=2)

    def _keep(self, layers: list[StitchLayer]) -> Tensor:
        """`[B]` slots per kv head that each row may hold now; on the CPU, because it fixes shapes."""
        seen = layers[0].row_tokens().cpu()
        itemsize = layers[0].keys.element_size()
        per_slot = sum(x.keys.shape[1] * (x.keys.shape[3] + x.values.shape[3]) for x in layers) * itemsize
        return self.press.budget.slots(seen, per_slot, least=self.press.allocator.num_sinks + 1)


def _check_slots(allocator: EvictingAllocator, slots: Tensor, length: int) -> None:
    """Not on a GPU, where looking at slots means to wait for them."""
    if slots.device.type != "cpu":
        return
    if not slots.numel() or int(slots.max()) < 0:
        raise ValueError(f"{type(allocator).__name__} kept no slot in any head")
    ends = slots[..., 1:] == -1
    ascend = bool((ends | (slots[..., 1:] > slots[..., :-1])).all()) and not bool(
        (ends[..., :-1] & ~ends[..., 1:]).any()
    )
    if not ascend or int(slots.max()) >= length or int(slots.min()) < -1:
        raise ValueError(
            f"{type(allocator).__name__} returned slots that are not unique and ascending within [0, {length}), with -1 at "
            "the end only"
        )


def _held(layers: list[StitchLayer]) -> Tensor:
    """`[L, B]` slots that each row holds in the fullest head of each layer, empty ones left out; on the CPU."""
    if layers[0].keys.shape[0] == 1 and not any(layer.has_empty for layer in layers):
        return torch.tensor([[layer.length] for layer in layers])
    counts = [(layer.stored_positions >= 0).sum(dim=-1).amax(dim=1) for layer in layers]
    return torch.stack(counts).cpu()


def _require_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        hint = f"; write {value.__name__}()" if isinstance(value, type) and issubclass(value, kind) else ""
        raise TypeError(f"`{name}` must be a {kind.__name__}, got {value!r}{hint}")
