"""Members of built regions that still stand among the new tokens, in the order in which they came."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.store import RegionStore

_ROOM = 256


class TailMembers:
    """For every slot that left the window since the last build: its region, and how many joined that region before it.

    Args:
        store: the regions.
    """

    def __init__(self, store: RegionStore):
        self._store = store
        shape = (*store.starts.shape[:2], _ROOM)
        self._labels = torch.zeros(shape, dtype=torch.int64, device=store.starts.device)
        self._before = torch.zeros_like(self._labels)
        self._count = 0

    def append(self, labels: Int64[Tensor, "B U 1"], joins: Bool[Tensor, "B 1"] | None) -> None:
        """Lists the next slot as a member of `labels`; call before the region's count grows."""
        if self._count == self._labels.shape[-1]:
            self._labels, self._before = (torch.nn.functional.pad(x, (0, _ROOM)) for x in (self._labels, self._before))
        before = (self._store.counts - self._store.sizes).gather(-1, labels)[..., 0]
        if joins is not None:
            # Where it is a sink it has no place: one that no region reaches.
            before = torch.where(joins, before, -(2**31))
        self._labels[..., self._count] = labels[..., 0]
        self._before[..., self._count] = before
        self._count += 1

    def place(
        self,
        slots: Int64[Tensor, "B U W1"],
        chosen: Int64[Tensor, "B U K"],
        begins: Int64[Tensor, "B U K"],
        first_slot: int,
    ) -> None:
        """Writes, in place, the listed members of the chosen regions to the front of each region's columns.

        Args:
            slots: the last column takes what is not read.
            chosen: regions in reading order.
            begins: column at which each begins.
            first_slot: slot of the first entry.
        """
        if self._count == 0:
            return
        group = chosen.shape[1] // self._labels.shape[1]
        labels, before = self._labels[..., : self._count], self._before[..., : self._count]
        listed = (self._store.counts - self._store.sizes).gather(-1, labels)
        if group > 1:
            labels, before, listed = (x.repeat_interleave(group, dim=1) for x in (labels, before, listed))
        last = slots.shape[-1] - 1
        begin = begins.new_full((*chosen.shape[:2], self._store.num), last).scatter_(-1, chosen, begins)
        # The newest comes first: it is the one that is read if not all fit.
        columns = (begin.gather(-1, labels) + listed - 1 - before).clamp_(max=last)
        own = torch.arange(first_slot, first_slot + self._count, device=slots.device).expand_as(columns)
        slots.scatter_(-1, columns, own)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._labels, self._before = function(self._labels), function(self._before)

    @property
    def stored_bytes(self) -> int:
        return self._labels.untyped_storage().nbytes() + self._before.untyped_storage().nbytes()
