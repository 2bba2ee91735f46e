"""The one top-k of the library: protected slots first, then the best scores inside each region."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

_INT32_MAX = 2**31 - 1
# Priorities are integers in [0, 2**32), the best first; with a region id in the bits above, one sort serves all regions.
_REGION_SHIFT = 32
_PROTECTED = 0
_EMPTY = 2**32 - 1


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
        batch, heads, ends = edges.shape
        regions, rows = ends - 1, batch * heads
        lengths = edges[..., 1:] - edges[..., :-1]
        ids = torch.repeat_interleave(lengths.reshape(-1), output_size=rows * num_slots).view(rows, num_slots)
        first = torch.arange(0, rows * regions, regions, device=edges.device)[:, None]
        return cls(ids.sub_(first).view(batch, heads, num_slots), edges[..., :-1])


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
    batch, heads, slots = scores.shape
    priority = _priority(scores, must, valid)
    place = torch.arange(slots, device=scores.device)
    if partition is None:
        order = priority.sort(dim=-1, stable=True).indices
        chosen = place < quotas
    else:
        ordered, order = priority.add_(partition.ids << _REGION_SHIFT).sort(dim=-1, stable=True)
        chosen = place < (partition.starts + quotas).gather(-1, ordered.bitwise_right_shift_(_REGION_SHIFT))
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, chosen)


def slots_of(mask: Bool[Tensor, "B H T"], count: int) -> Int64[Tensor, "B H K"]:
    """The marked slots in ascending order, -1 after the last one; `count` is K, the most that a head has marked."""
    batch, heads, slots = mask.shape
    wanted = torch.arange(1, count + 1, device=mask.device).expand(batch, heads, count).contiguous()
    found = torch.searchsorted(mask.cumsum(dim=-1), wanted)
    return found.masked_fill_(found == slots, -1)


def protected(
    num_first: Int64[Tensor, "B H 1"],
    first_recent: Int64[Tensor, "B H 1"],
    valid: Bool[Tensor, "B H T"] | None,
    slots: int,
) -> Bool[Tensor, "B H T"]:
    """Marks sinks and recent tokens: the first `num_first` valid slots, and those from the `first_recent`-th on."""
    if valid is None:
        place = torch.arange(slots, device=num_first.device)
        return (place < num_first) | (place >= first_recent)
    rank = valid.cumsum(dim=-1)
    return ((rank <= num_first) | (rank > first_recent)) & valid


def _priority(scores: Tensor, must: Tensor | None, valid: Tensor | None) -> Tensor:
    """int64, ascending = better: protected, then scores from high to low, then NaN, then empty."""
    # NaN falls below every number; adding 0 turns -0 into 0, which must tie with it.
    bits = scores.nan_to_num(nan=float("-inf")).add_(0.0).view(torch.int32)
    # Bits of floats order as integers once the magnitude of negative ones is flipped.
    bits ^= (bits >> 31).bitwise_and_(_INT32_MAX)
    priority = _INT32_MAX - bits.long()
    if must is not None:
        priority.masked_fill_(must, _PROTECTED)
    return priority if valid is None else priority.masked_fill_(~valid, _EMPTY)


def gather_state(state: Float32[Tensor, "B H T"], slots: Int64[Tensor, "B H K"]) -> Float32[Tensor, "B H K"]:
    """A per-slot state in the order of `slots`, 0 where they are -1."""
    return state.gather(-1, slots.clamp(min=0)).masked_fill_(slots < 0, 0.0)
