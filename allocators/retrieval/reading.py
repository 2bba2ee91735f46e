"""The slots of one step put together: sinks, retrieved ones, the newest; nothing twice, nothing that is not there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.base import DecodeStep, ReadPlan
from kvstitch.views import LayerView

_MOST_LISTED = 2**31
_ROW_TENSORS = ("listed", "_first", "_limits", "_totals", "_slots")


@dataclass(frozen=True)
class Parts:
    """How the stored slots divide at the moment an index is built.

    Args:
        boundary: first slot of the newest `num_recent`.
        sinks: `[B, H, T]` the first `num_sinks` tokens of each row, as far as they lie before the boundary.
        body: `[B, H, T]` tokens before the boundary that are no sinks: what regions are made of.
        first: slot at which each row's tokens begin once its empty slots before the boundary stand in front.
        has_empty_recent: whether a slot at or after the boundary is empty.
        empty_in_front: whether all empty slots before the boundary stand in front of each row's tokens already.
    """

    boundary: int
    sinks: Bool[Tensor, "B H T"]
    body: Bool[Tensor, "B H T"]
    first: tuple[int, ...]
    has_empty_recent: bool
    empty_in_front: bool

    @classmethod
    def of(cls, view: LayerView, plan: ReadPlan) -> "Parts":
        boundary = max(view.positions.shape[-1] - plan.num_recent, 0)
        old = torch.arange(view.positions.shape[-1], device=view.positions.device) < boundary
        # A sequence that was cut somewhere does not begin at position 0.
        begin = view.positions.masked_fill(~view.valid, torch.iinfo(torch.int64).max).amin(dim=-1, keepdim=True)
        sinks = view.valid & (view.positions < begin + plan.num_sinks)
        empty = ~view.valid & old
        count = empty[:, 0].sum(dim=-1)
        leading = empty.long().cumprod(dim=-1).sum(dim=-1)
        # A row so short that it begins in the window does so at its first token.
        begins_before = (view.valid[:, 0] & old).any(dim=-1)
        first = torch.where(begins_before, count, view.valid[:, 0].int().argmax(dim=-1))
        return cls(
            boundary=boundary,
            sinks=sinks & old,
            body=view.valid & ~sinks & old,
            first=tuple(first.tolist()),
            has_empty_recent=bool((~view.valid & ~old).any()),
            empty_in_front=bool((leading == count[:, None]).all()),
        )

    @property
    def num_body(self) -> tuple[int, ...]:
        """Tokens in the body of each row."""
        return tuple(self.body[:, 0].sum(dim=-1).tolist())


def empty_first(view: LayerView, parts: Parts) -> Int64[Tensor, "B H T"] | None:
    """The order that puts empty slots before the window in front and moves nothing else; None if they stand there."""
    if parts.empty_in_front:
        return None
    old = torch.arange(view.positions.shape[-1], device=view.positions.device) < parts.boundary
    return (view.valid | ~old).to(torch.int8).sort(dim=-1, stable=True).indices


class ReadBuffer:
    """Puts the slots of each step into one tensor that is made once.

    Args:
        plan: what a step may read.
        parts: the division at the time of building; empty slots stand in front.
        units: U, selections per layer.
        shortlist: how many times the slots that it retrieves a row lists, to choose among them.

    Attributes:
        width: slots that the largest row retrieves.
        most_listed: slots that the largest row lists.
        listed: `[B]` slots that each row lists; no more than 2 ** 31, which is more than there are.
        least_total: tokens in the regions of the shortest row, or a lower bound.
        boundary: first slot of the window.
    """

    def __init__(self, plan: ReadPlan, parts: Parts, units: int, shortlist: float | int = 1):
        device = parts.body.device
        self.width = max(plan.retrieved)
        listed = [max(count, int(min(count * shortlist, _MOST_LISTED))) for count in plan.retrieved]
        self.most_listed, self.listed = max(listed), torch.tensor(listed, device=device)
        self._num_sinks, self.num_recent = plan.num_sinks, plan.num_recent
        self._first = torch.tensor(parts.first, device=device)[:, None, None]
        self._most_first = max(parts.first)
        self._limits = torch.tensor(plan.retrieved, device=device)[:, None, None]
        self._totals = torch.tensor(parts.num_body, device=device)[:, None, None]
        self._same_limits = len(set(plan.retrieved)) == 1
        self._filled = self._same_limits and min(parts.num_body) >= self.width
        self.least_total = min(parts.num_body)
        self.boundary = parts.boundary
        self._check = parts.has_empty_recent
        self._slots = torch.zeros(len(parts.first), units, plan.width, dtype=torch.int64, device=device)
        self._slots[..., : self._num_sinks] = self._first + torch.arange(self._num_sinks, device=device)
        self._refresh()
        self._recent[...] = parts.boundary + torch.arange(self.num_recent, device=device)
        self._place = torch.arange(self.width, device=device)

    def _refresh(self) -> None:
        self._recent = self._slots[..., self._num_sinks : self._num_sinks + self.num_recent]
        self._body = self._slots[..., self._num_sinks + self.num_recent :]

    @property
    def limits(self) -> Int64[Tensor, "B 1 1"] | None:
        """Slots that each row may retrieve; None if all may fill the whole width."""
        return None if self._same_limits else self._limits

    def advance(self, length: int) -> range:
        """Moves the window to the end of `length` slots; returns the slots that left it since the last call."""
        left = range(self.boundary, length - self.num_recent)
        self.boundary = left.stop
        if len(left):
            self._recent += len(left)
        self.least_total += sum(self.joins(slot) is None for slot in left)
        if not self._filled:
            for slot in left:
                joins = self.joins(slot)
                self._totals += 1 if joins is None else joins[..., None]
            self._filled = self._same_limits and self.least_total >= self.width
        return left

    def joins(self, slot: int) -> Bool[Tensor, "B 1"] | None:
        """Which rows count a slot that left the window among their regions, not among their sinks; None: all."""
        if slot >= self._most_first + self._num_sinks:
            return None
        return slot >= self._first[..., 0] + self._num_sinks

    def body_mask(self, step: DecodeStep) -> Bool[Tensor, "B 1 T"]:
        """Slots that may be retrieved now; padding among new tokens counts, `fill` drops it."""
        slot = torch.arange(step.length, device=step.keys.device)
        return (slot >= self._first + self._num_sinks) & (slot < self.boundary)

    def fill(
        self, retrieved: Int64[Tensor, "B U R1"], step: DecodeStep, listed: Int64[Tensor, "B U 1"] | None = None
    ) -> tuple[Int64[Tensor, "B U M"], bool]:
        """The slots of the step, -1 where there is none, and whether none is -1.

        Args:
            retrieved: the first `width` columns are slots, as many as the row may and can retrieve.
            listed: how many are, if that may be fewer.
        """
        self._check = self._check or step.has_padding
        body = self._body.copy_(retrieved[..., : self.width])
        if not self._filled:
            body.masked_fill_(self._place >= torch.minimum(self._limits, self._totals), -1)
        if listed is not None:
            body.masked_fill_(self._place >= listed, -1)
        overlapping = self.boundary < self._most_first + self._num_sinks
        if self._filled and listed is None and not overlapping and not self._check:
            return self._slots, True
        slots = self._slots
        if overlapping:
            slots = self._without_overlap(step.length)
        if self._check:
            slots = _without_padding(slots, step.positions)
        return slots, False

    def _without_overlap(self, length: int) -> Tensor:
        """For rows so short that sinks lie in the window, or are not there yet."""
        slots = self._slots.clone()
        sinks = slots[..., : self._num_sinks]
        sinks.masked_fill_(sinks >= length, -1)
        recent = slots[..., self._num_sinks : self._num_sinks + self.num_recent]
        recent.masked_fill_(recent < self._first + self._num_sinks, -1)
        return slots

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        for name in _ROW_TENSORS:
            setattr(self, name, function(getattr(self, name)))
        self._refresh()

    @property
    def stored_bytes(self) -> int:
        return sum(getattr(self, name).untyped_storage().nbytes() for name in (*_ROW_TENSORS, "_place"))


def _without_padding(slots: Tensor, positions: Tensor) -> Tensor:
    group = slots.shape[1] // positions.shape[1]
    by_unit = positions if group == 1 else positions.repeat_interleave(group, dim=1)
    empty = by_unit.gather(-1, slots.clamp(min=0)) < 0
    return slots.masked_fill(empty, -1)
