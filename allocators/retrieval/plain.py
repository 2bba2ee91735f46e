"""Retrieval without regions: the newest tokens, or whatever has the largest weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from kvstitch.allocators.options import check_choices
from kvstitch.allocators.retrieval.base import DecodeStep, LayerFrame, LayerIndex, ReadPlan, Reads, RetrievingAllocator
from kvstitch.allocators.retrieval.reading import Parts, ReadBuffer, empty_first
from kvstitch.allocators.retrieval.scoring import SELECTIONS
from kvstitch.views import LayerView


class PlainIndex(LayerIndex):
    """An index that holds nothing but the division into sinks, body and window."""

    def __init__(self, frame: LayerFrame, units_per_head: int):
        self.frame = frame
        self._units_per_head = units_per_head
        self.parts: Parts | None = None
        self._buffer: ReadBuffer | None = None

    def build(
        self, view: LayerView, plan: ReadPlan, scores: Float32[Tensor, "B H T"] | None = None
    ) -> Int64[Tensor, "B H T"] | None:
        self.parts = parts = Parts.of(view, plan)
        self._buffer = ReadBuffer(plan, parts, view.keys.shape[1] * self._units_per_head)
        return empty_first(view, parts)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._buffer is not None:
            self._buffer.map_rows(function)

    @property
    def stored_bytes(self) -> int:
        return 0


class WindowIndex(PlainIndex):
    """Retrieves the newest tokens before the window."""

    def select(self, step: DecodeStep) -> Reads:
        self._buffer.advance(step.length)
        newest = step.length - self._buffer.num_recent - 1
        retrieved = newest - torch.arange(self._buffer.width, device=step.keys.device)
        batch, heads = step.keys.shape[:2]
        slots, complete = self._buffer.fill(retrieved.expand(batch, heads, -1), step)
        return Reads(slots, complete)


class OracleIndex(PlainIndex):
    """Retrieves the tokens of the largest attention weight, for which all keys are read."""

    def select(self, step: DecodeStep) -> Reads:
        self._buffer.advance(step.length)
        batch, heads, length, dim = step.keys.shape
        rows = step.query.view(batch, heads, step.group, dim)
        logits = (rows.float() @ step.keys.float().transpose(-1, -2)) * self.frame.scaling
        if self.frame.softcap is not None:
            logits = self.frame.softcap * torch.tanh(logits / self.frame.softcap)
        empty = (step.positions < 0)[:, :, None]
        weights = logits.masked_fill(empty, -torch.inf).softmax(dim=-1)
        weights = weights.flatten(1, 2) if self._units_per_head > 1 else weights.mean(dim=2)
        body = self._buffer.body_mask(step)
        weights = weights.masked_fill(~body, -1.0)
        slots = weights.topk(min(self._buffer.width, length), dim=-1).indices
        slots = torch.nn.functional.pad(slots, (0, self._buffer.width - slots.shape[-1]))
        slots, complete = self._buffer.fill(slots, step)
        return Reads(slots, complete, key_rows=length)


@dataclass(frozen=True, kw_only=True)
class WindowRetrieval(RetrievingAllocator):
    """Sinks and a sliding window as long as the budget (StreamingLLM, arXiv 2309.17453, over a complete cache)."""

    def start(self, frame: LayerFrame) -> LayerIndex:
        return WindowIndex(frame, 1)


@dataclass(frozen=True, kw_only=True)
class OracleRetrieval(RetrievingAllocator):
    """The exact best choice: the tokens of the largest attention weight. Reads every key; a bound, not a method.

    Args:
        select: one choice per "kv_head", by the mean weight of its query heads, or per "query_head".
    """

    select: str = "kv_head"

    def __post_init__(self):
        check_choices(self, {"select": SELECTIONS})

    def start(self, frame: LayerFrame) -> LayerIndex:
        return OracleIndex(frame, frame.group if self.select == "query_head" else 1)
