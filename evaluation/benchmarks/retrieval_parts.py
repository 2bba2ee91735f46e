"""What the retrieval benchmarks are made of: communities without a prompt, contestants, the memory bandwidth."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvstitch.allocators.retrieval import CommunityRetrieval, LayerFrame, LayerIndex, RetrievingAllocator
from kvstitch.allocators.retrieval.reading import Parts
from kvstitch.allocators.retrieval.region_index import RegionIndex
from kvstitch.evaluation.benchmarks.timing import Contestant
from kvstitch.evaluation.reads import ReadMeter
from kvstitch.evaluation.streams import auxiliary_bytes
from kvstitch.presses.retrieval import RetrievalPress
from kvstitch.presses.retrieval_run import RetrievalRun
from kvstitch.views import LayerView

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_dtypes(names: Sequence[str]) -> None:
    """Raise unless all are dtypes that are timed."""
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {', '.join(unknown)}")


def index_share(cache: Cache) -> float:
    """Bytes that stay beside keys and values, over those of the keys and values in use, room for growth left out.

    Measured: everything that can be reached from the cache counts, whether its owner thinks of it or not.
    """
    return auxiliary_bytes(cache) / sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


@dataclass(frozen=True)
class MadeUpCommunities(RetrievingAllocator):
    """Communities with random members, read as `like` reads its own; for timing steps without reading a prompt.

    Args:
        like: whose way of reading and of growing is timed.
        tokens_per_region: mean size; sizes vary as those of real communities do, from single tokens to many times that.
    """

    like: CommunityRetrieval
    tokens_per_region: int

    def start(self, frame: LayerFrame) -> LayerIndex:
        return _MadeUpIndex(frame, self.like, self.tokens_per_region)


class _MadeUpIndex(RegionIndex):
    fresh_degrees = None
    carried_over = False

    def __init__(self, frame: LayerFrame, like: CommunityRetrieval, tokens_per_region: int):
        super().__init__(frame, like.read_options, like.growth_rule())
        self._tokens_per_region = tokens_per_region

    def partition(self, view: LayerView, parts: Parts) -> Tensor:
        generator = torch.Generator().manual_seed(self.frame.layer_idx)
        count = -(-view.positions.shape[-1] // self._tokens_per_region)
        # Exponential weights give sizes as skewed as those of Leiden at a fine resolution.
        weights = torch.empty(count).exponential_(generator=generator)
        labels = torch.multinomial(weights, view.positions.numel(), replacement=True, generator=generator)
        return labels.view(view.positions.shape).to(view.positions.device)


class StockDecoder:
    """A model over its own kind of cache, filled with given keys and values.

    Args:
        keys, values: `[L, 1, H, T, D]`.
        steps: tokens decoded each time.
    """

    def __init__(self, model: PreTrainedModel, keys: Tensor, values: Tensor, steps: int):
        self.model, self._steps = model, steps
        self.cache = DynamicCache(config=model.config)
        for layer, layer_keys, layer_values in zip(self.cache.layers, keys, values):
            layer.update(layer_keys.clone(), layer_values.clone())

    @property
    def timed(self) -> Contestant:
        return Contestant(lambda _: self.decode())

    @torch.no_grad()
    def decode(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(self._steps):
            logits = self.model(token, past_key_values=self.cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True)


class PressedDecoder(StockDecoder):
    """The same with a retrieval press; a budget above the length makes every step dense."""

    def __init__(self, model: PreTrainedModel, keys: Tensor, values: Tensor, steps: int, press: RetrievalPress):
        super().__init__(model, keys, values, steps)
        self.press = press
        with press(model) as run:
            # The first steps take the cache over and build the index.
            self.decode()
        self._run: RetrievalRun = run

    @property
    def timed(self) -> Contestant:
        return Contestant(self._decode_pressed, self._enter)

    def _enter(self) -> RetrievalRun:
        return self.press(self.model).__enter__()

    def _decode_pressed(self, run: RetrievalRun) -> None:
        self.decode()
        run.__exit__(None, None, None)

    def bytes_read(self) -> float:
        """Bytes that a step reads of keys, values and index."""
        meter = ReadMeter()
        with dataclasses.replace(self.press, on_read=meter)(self.model):
            self.decode()
        return meter.metrics(self.cache)["read_bytes"]

    def index_share(self) -> float:
        """See `index_share`."""
        return index_share(self.cache)


def bandwidth(megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes a second at which memory is read front to back with the present number of threads."""
    block = torch.ones(megabytes * 2**18)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - start)
    return block.numel() * 4 / statistics.median(seconds)
