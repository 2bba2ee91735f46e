"""The final pick of every evicting allocator: protected slots first, then the best scores inside each region."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvstitch.kernels.common.selection import ascending_slots, mark_best, mark_protected, regions_of_edges


@dataclass(frozen=True)
class Partition:
    """Regions of the slots of each head; a region need not be contiguous.

    Args:
        ids: `[B, H, T]` region of each slot, in [0, R); empty slots may name any.
        starts: `[B, H, R]` how many slots lie in the regions before this one.
    """

    ids: Int64[Tensor, "B H T"]
    starts: Int64[Tensor, "B H R"]

    @classmethod
    def of_ids(cls, ids: Int64[Tensor, "B H T"], num_regions: int) -> "Partition":
        """From the region of each slot; every id must lie in [0, num_regions)."""
        counts = ids.new_zeros(*ids.shape[:-1], num_regions).scatter_add_(-1, ids, torch.ones_like(ids))
        return cls(ids, counts.cumsum(dim=-1) - counts)

    @classmethod
    def of_edges(cls, edges: Int64[Tensor, "B H R1"], num_slots: int) -> "Partition":
        """Contiguous regions between ascending edges, of which the first is 0 and the last `num_slots`."""
        return cls(*regions_of_edges(edges, num_slots))


def select(
    scores: Float32[Tensor, "B H T"],
    quotas: Int64[Tensor, "B H R"],
    partition: Partition | None = None,
    must: Bool[Tensor, "*M T"] | None = None,
    valid: Bool[Tensor, "B H T"] | None = None,
) -> Bool[Tensor, "B H T"]:
    """Marks the slots to keep: in each region its protected slots, then its best scores, `quotas` in all.

    Equal scores go to the lower slot, NaN loses against everything, and an empty slot is never kept.

    Args:
        scores: higher = keep.
        quotas: slots to keep in each region, at most its valid slots, at least its protected ones.
        partition: None for a single region (R = 1).
        must: protected slots, whatever their scores.
        valid: None if no slot is empty.
    """
    regions = None if partition is None else (partition.ids, partition.starts)
    return mark_best(scores, quotas, regions, must, valid)


def slots_of(mask: Bool[Tensor, "B H T"], count: int) -> Int64[Tensor, "B H K"]:
    """The marked slots in ascending order, -1 after the last one; `count` is K, the most that a head has marked."""
    return ascending_slots(mask, count)


def protected(
    num_first: Int64[Tensor, "B H 1"],
    first_recent: Int64[Tensor, "B H 1"],
    valid: Bool[Tensor, "B H T"] | None,
    slots: int,
) -> Bool[Tensor, "B H T"]:
    """Marks sinks and recent tokens: the first `num_first` valid slots, and those from the `first_recent`-th on."""
    return mark_protected(num_first, first_recent, valid, slots)


def gather_state(state: Float32[Tensor, "B H T"], slots: Int64[Tensor, "B H K"]) -> Float32[Tensor, "B H K"]:
    """A per-slot state in the order of `slots`, 0 where they are -1."""
    return state.gather(-1, slots.clamp(min=0)).masked_fill_(slots < 0, 0.0)


def unless_full(valid: Bool[Tensor, "B H T"]) -> Bool[Tensor, "B H T"] | None:
    """None if no slot is empty, which spares all later work for holes; on a GPU a look would wait for the device."""
    return valid if valid.is_cuda or not bool(valid.all()) else None
