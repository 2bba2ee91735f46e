"""The one top-k of the library: protected slots first, then the best scores inside each region; plain torch."""

import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1
# Priorities are integers in [0, 2**32), the best first; with a region in the bits above, one sort serves all regions.
_REGION_SHIFT = 32
_PROTECTED, _EMPTY = 0, 2**32 - 1


def mark_best(
    scores: Tensor,
    quotas: Tensor,
    regions: tuple[Tensor, Tensor] | None,
    must: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    """`[B, H, T]` bool: in each region its protected slots, then its best scores, `quotas` in all.

    Equal scores go to the lower slot, NaN loses against everything, and an empty slot is never marked.

    Args:
        scores: `[B, H, T]` float32, higher = keep.
        quotas: `[B, H, R]` slots to mark in each region, at most its valid slots, at least its protected ones.
        regions: region of each slot `[B, H, T]`, and how many slots lie in the regions before each `[B, H, R]`; None for a
            single region. A region need not be contiguous.
        must: protected slots, whatever their scores.
        valid: None if no slot is empty.
    """
    priority = _priority(scores, must, valid)
    place = torch.arange(scores.shape[-1], device=scores.device)
    if regions is None:
        order, chosen = priority.sort(dim=-1, stable=True).indices, place < quotas
    else:
        ids, starts = regions
        ordered, order = priority.add_(ids << _REGION_SHIFT).sort(dim=-1, stable=True)
        # A region's slots stand together in the sorted order.
        chosen = place < (starts + quotas).gather(-1, ordered.bitwise_right_shift_(_REGION_SHIFT))
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, chosen)


def mark_protected(num_first: Tensor, first_recent: Tensor, valid: Tensor | None, slots: int) -> Tensor:
    """`[B, H, T]` bool: the first `num_first` `[B, H, 1]` valid slots, and those from the `first_recent`-th on."""
    if valid is None:
        place = torch.arange(slots, device=num_first.device)
        return (place < num_first) | (place >= first_recent)
    rank = valid.cumsum(dim=-1)
    return ((rank <= num_first) | (rank > first_recent)) & valid


def ascending_slots(marked: Tensor, count: int) -> Tensor:
    """`[B, H, count]` int64: the marked slots in ascending order, -1 after the last one."""
    batch, heads, slots = marked.shape
    wanted = torch.arange(1, count + 1, device=marked.device).expand(batch, heads, count).contiguous()
    found = torch.searchsorted(marked.cumsum(dim=-1), wanted)
    return found.masked_fill_(found == slots, -1)


def regions_of_edges(edges: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Regions between ascending `edges` `[B, H, R + 1]`, of which the first is 0 and the last `slots`."""
    batch, heads, ends = edges.shape
    lengths = edges[..., 1:] - edges[..., :-1]
    # The number of the result is stated, so that a GPU need not be waited for.
    flat = torch.repeat_interleave(lengths.reshape(-1), output_size=batch * heads * slots)
    return flat.view(batch, heads, slots).remainder_(ends - 1), edges[..., :-1]


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
