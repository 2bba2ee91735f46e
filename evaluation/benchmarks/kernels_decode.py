"""A whole model of random weights: decoded tokens a second and memory, dense against retrieval and eviction."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstitch.allocators import GlobalTopK, SegmentQuota
from kvstitch.allocators.retrieval import CommunityRetrieval, LayerFrame, LayerIndex, RetrievingAllocator
from kvstitch.allocators.retrieval.reading import Parts
from kvstitch.allocators.retrieval.region_index import RegionIndex
from kvstitch.evaluation.benchmarks.kernels_models import ModelShape
from kvstitch.presses import EvictionPress
from kvstitch.presses.retrieval import RetrievalPress
from kvstitch.scorers import TOVA, KeyNorm
from kvstitch.views import LayerView

# Operators that a contestant runs: in its decode steps, or before them to put its storage in order.
USES = {
    "dense": (),
    "folded": (),
    "query_group": ("sparse_decode", "compact"),
    "per_head": ("sparse_decode",),
    "paper_query_group": ("sparse_decode", "compact", "community_update"),
    "paper_per_head": ("sparse_decode", "community_update"),
    "ams": ("segment_quota", "compact"),
    "rest": (),
}


@dataclass(frozen=True)
class RandomCommunities(RetrievingAllocator):
    """Communities with random members, read and grown as `like` does with its own; on the device, without a prompt.

    Args:
        like: whose way of reading and of growing is timed; its `aggregation` says who has communities.
        tokens_per_region: mean size.
    """

    like: CommunityRetrieval
    tokens_per_region: int

    def start(self, frame: LayerFrame) -> LayerIndex:
        return _RandomIndex(frame, self.like, self.tokens_per_region)


class _RandomIndex(RegionIndex):
    fresh_degrees = None
    carried_over = False

    def __init__(self, frame: LayerFrame, like: CommunityRetrieval, tokens_per_region: int):
        super().__init__(frame, like.read_options, like.growth_rule())
        self._units_per_head = frame.group if like.aggregation == "per_head" else 1
        self._tokens_per_region = tokens_per_region

    def partition(self, view: LayerView, parts: Parts) -> Tensor:
        batch, heads, length = view.positions.shape
        generator = torch.Generator(view.keys.device).manual_seed(self.frame.layer_idx)
        count = -(-length // self._tokens_per_region)
        # A uniform number squared makes early regions larger, as sizes of real communities differ.
        shape = (batch, heads * self._units_per_head, length)
        drawn = torch.rand(shape, generator=generator, device=view.keys.device)
        return (drawn.square_() * count).long()


@dataclass(frozen=True)
class DecodeSetting:
    """What all contestants of one model and context share.

    Args:
        model: of random weights.
        shape: its own.
        context: tokens in the cache, random numbers.
        budget: slots that a step reads, or an event keeps.
        interval: decoded tokens between events.
        steps: tokens decoded under the clock, after as many before it.
    """

    model: PreTrainedModel
    shape: ModelShape
    context: int
    budget: int
    interval: int
    steps: int

    @property
    def device(self) -> str:
        return self.model.device.type


def decode_rows(
    name: str, setting: DecodeSetting, contestants: Sequence[str], red: Sequence[str], enough_time: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """One row a contestant, one after the other, so that each has the memory to itself.

    - dense: transformers' DynamicCache and sdpa, as users have it.
    - folded: our cache, which grows without a concatenation a step, query heads folded into rows; reads everything.
    - query_group, per_head: CommunityKV's recommended preset, communities of kv heads or of query heads.
    - paper_query_group, paper_per_head: the same with the paper's values, communities growing by modularity.
    - ams: evicts to the budget at once, then every `interval` tokens; an event's time is shared out over them.
    - rest: the model over one token, so everything but attention and whatever the host costs.

    `speedup` is over dense, `peak_gib` the most memory of a contestant from its full cache on, weights included,
    `peak_increase` its excess over dense's, and `index_share` what is held beside keys and values, over these: the columns
    of CommunityKV's throughput table.

    What fails is noted in its row, and the next one has its turn.

    Args:
        red: operators whose check failed; who needs one is refused.
        enough_time: asked before each contestant.
    """
    dense = None
    for contestant in contestants:
        row = {"kind": "decode", "model": name, "context": setting.context, "contestant": contestant}
        refused = [operator for operator in USES[contestant] if operator in red]
        if refused or not enough_time():
            note = f"refused: {', '.join(refused)} is wrong here" if refused else "left out: no time"
            yield row | dict.fromkeys(_FIGURES) | {"note": note}
            continue
        try:
            figures = _measure(setting, contestant)
        except Exception as error:
            # Memory that does not suffice, mostly; on a lent machine the others are still worth their time.
            yield row | dict.fromkeys(_FIGURES) | {"note": f"failed: {type(error).__name__}: {error}"}
            continue
        dense = figures if contestant == "dense" else dense
        yield row | figures | _beside(dense, figures) | {"note": ""}


_FIGURES = (
    "tokens_per_sec",
    "step_ms",
    "event_ms",
    "index_share",
    "peak_gib",
    "steady_gib",
    "speedup",
    "peak_increase",
)


def _beside(dense: Mapping[str, Any] | None, figures: Mapping[str, Any]) -> dict[str, float | None]:
    """`speedup` and `peak_increase`; None where the dense model was not measured, or its memory was not."""
    if dense is None:
        return {"speedup": None, "peak_increase": None}
    more = None if dense["peak_gib"] is None else round(figures["peak_gib"] / dense["peak_gib"] - 1, 3)
    return {"speedup": round(dense["step_ms"] / figures["step_ms"], 2), "peak_increase": more}


def _measure(setting: DecodeSetting, contestant: str) -> dict[str, Any]:
    gc.collect()
    press = _press(setting, contestant)
    cache = _filled_cache(setting, 1 if contestant == "rest" else setting.context)
    if setting.device == "cuda":
        # What the last contestant left in pieces would not serve as one long block.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    token = torch.zeros(1, 1, dtype=torch.int64, device=setting.model.device)
    event_sec, index_share = 0.0, None
    with nullcontext() if press is None else press(setting.model) as run, torch.no_grad():
        # The first step takes the cache over and builds the index.
        token = _decode(setting.model, cache, token, 1)
        if contestant == "ams":
            # From the whole prompt to the budget; the event that is timed below is of the size that recurs.
            run.compact()
        token = _decode(setting.model, cache, token, setting.steps)
        step_sec = _clocked(lambda: _decode(setting.model, cache, token, setting.steps), setting.device) / setting.steps
        if contestant == "ams":
            event_sec = _recurring_event(setting, run, cache)
        if isinstance(press, RetrievalPress):
            index_share = round(run.index_share, 4)
    per_token = step_sec + event_sec / setting.interval
    figures = {
        "tokens_per_sec": round(1 / per_token, 2),
        "step_ms": round(per_token * 1e3, 3),
        "event_ms": round(event_sec * 1e3, 2) if event_sec else None,
        "index_share": index_share,
    }
    return figures | _memory(setting.device)


def _recurring_event(setting: DecodeSetting, run, cache: DynamicCache) -> float:
    """Seconds of an event over budget + interval slots, its layers filled up with random tokens."""
    missing = setting.budget + setting.interval - run.stored_tokens[0]
    for layer in run.layers.values():
        new = torch.randn(2, *layer.keys.shape[:2], missing, layer.keys.shape[3], device=layer.keys.device)
        layer.request.announced = False
        layer.update(*new.to(layer.keys.dtype))
    return _clocked(run.compact, setting.device)


def _press(setting: DecodeSetting, contestant: str) -> RetrievalPress | EvictionPress | None:
    if contestant in ("dense", "rest"):
        return None
    if contestant == "folded":
        # Never compacts, as its interval is not reached.
        return EvictionPress(KeyNorm(), GlobalTopK(), setting.budget, interval=10**6)
    if contestant == "ams":
        return EvictionPress(TOVA(), SegmentQuota.recommended(), setting.budget, interval=10**6, record_events=False)
    preset = CommunityRetrieval.paper if contestant.startswith("paper") else CommunityRetrieval.recommended
    aggregation = "per_head" if contestant.endswith("per_head") else "query_group"
    communities = RandomCommunities(preset(aggregation=aggregation), tokens_per_region=16)
    return RetrievalPress(communities, setting.budget, record_events=False)


def _filled_cache(setting: DecodeSetting, context: int) -> DynamicCache:
    """Random keys and values, as if a prompt had been read: what a step costs does not depend on them."""
    cache, shape = DynamicCache(config=setting.model.config), setting.shape
    generator = torch.Generator(setting.device).manual_seed(0)
    size = (1, shape.num_kv_heads, context, shape.head_dim)
    new = lambda: torch.randn(size, generator=generator, device=setting.device, dtype=setting.model.dtype)
    for layer in cache.layers:
        layer.update(new(), new())
    return cache


def _decode(model: PreTrainedModel, cache: DynamicCache, token: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
    return token


def _clocked(action: Callable[[], object], device: str) -> float:
    """Seconds on the wall until the device is done too: what a user waits for, the host's own time included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _memory(device: str) -> Mapping[str, float | None]:
    if device != "cuda":
        return {"peak_gib": None, "steady_gib": None}
    peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return {"peak_gib": round(peak / 2**30, 2), "steady_gib": round(now / 2**30, 2)}
