"""Segments as sorted edges, cut, split and merged without a loop; plain torch.

Edges are int64 `[B, H, R + 1]`, from 0 to the number of valid slots, in coordinates that skip empty slots. A segment of
zero length is no segment: R is fixed by shapes and rules, never by data, so that nothing waits for the device.
"""

import math

import torch
from torch import Tensor

from kvstitch.kernels.segment_quota.rules import SegmentRules

# Running sums miss an exact multiple of the segment mass by rounding; uniform mass would then be cut one slot late.
_CUT_TOLERANCE = 1e-6


def mass_edges(prefix: Tensor, rank: Tensor | None, rules: SegmentRules) -> Tensor:
    """Edges of segments of about equal mass, none shorter or longer than the rules allow (AMS, section 3.2).

    Args:
        prefix: `[B, H, T]` float64 running sum of the mass.
        rank: `[B, H, T]` number of valid slots up to and including each slot; None if no slot is empty.

    Returns: edges in ascending order; those that are not needed stand at the end and equal the last.
    """
    slots = prefix.shape[-1]
    count = slots if rank is None else rank[..., -1:]
    edges = with_ends(_cuts(prefix, rank, rules), count)
    if edges.shape[-1] == 2 and rules.split == "chunk":
        # The public code returns before it looks at lengths when no threshold exists.
        return edges
    too_long = slots > rules.max_segment_tokens
    if too_long:
        edges = _split_long(edges, slots, rules)
    return _merge_short(edges, too_long, rules)


def fixed_edges(prefix: Tensor, rank: Tensor | None, segment_tokens: int) -> Tensor:
    """Edges every `segment_tokens` valid slots."""
    slots = prefix.shape[-1]
    grid = torch.arange(0, slots + segment_tokens, segment_tokens, device=prefix.device)
    grid = grid.expand(*prefix.shape[:-1], -1)
    return grid.clamp(max=slots) if rank is None else torch.minimum(grid, rank[..., -1:])


def with_ends(cuts: Tensor, count: int | Tensor) -> Tensor:
    """Cuts with 0 before them and the number of slots after them."""
    first = cuts.new_zeros(*cuts.shape[:-1], 1)
    last = torch.full_like(first, count) if isinstance(count, int) else count
    return torch.cat((first, cuts, last), dim=-1)


def num_thresholds(segment_mass: float) -> int:
    """How many multiples of the segment mass lie below 1."""
    return max(0, math.ceil(1 / segment_mass - 1e-9) - 1)


def _cuts(prefix: Tensor, rank: Tensor | None, rules: SegmentRules) -> Tensor:
    """Where the running mass first reaches each multiple of the segment mass: `[B, H, thresholds]` edges."""
    batch, heads, slots = prefix.shape
    number = num_thresholds(rules.segment_mass)
    if rules.boundary == "include":
        thresholds = torch.arange(1, number + 1, device=prefix.device, dtype=torch.float64) * rules.segment_mass
        reached = thresholds - _CUT_TOLERANCE
    else:
        reached, prefix = _public_thresholds(rules.segment_mass, number, prefix.device), prefix.float()
    crossing = torch.searchsorted(prefix, reached.expand(batch, heads, number).contiguous())
    # `ends`: slots up to and including the crossing one. It closes its segment, or opens the next in the public code.
    ends = crossing + 1 if rank is None else rank.gather(-1, crossing.clamp_(max=slots - 1))
    if rules.boundary == "include":
        return ends
    last = slots - 1 if rank is None else (rank[..., -1:] - 1).clamp(min=0)
    return (ends - 1).clamp(min=1).clamp(max=last)


def _public_thresholds(segment_mass: float, number: int, device: torch.device) -> Tensor:
    """The float32 thresholds behind the public figures, on any machine.

    They come from a float32 `torch.arange` on an AVX2 processor: in whole groups of eight only the first value is
    rounded from the exact one, the others are stepped from it. Uniform mass meets thresholds exactly, so it shows.
    """
    index = torch.arange(number, device=device)
    first = torch.where(index < number - number % 8, index - index % 8, index)
    exact = segment_mass + first.double() * segment_mass
    return (exact.float().double() + (index - first).double() * segment_mass).float()


def _split_long(edges: Tensor, slots: int, rules: SegmentRules) -> Tensor:
    """Adds the edges that bring every segment to `max_segment_tokens` or less.

    A segment of L slots, cut into `n = ceil(L / max)` parts, holds at least n - 1 multiples of `max` in its inside.
    So one candidate per multiple is enough: the p-th multiple inside a segment becomes its p-th inner edge, and those
    that a segment does not need collapse onto its end.
    """
    size = rules.max_segment_tokens
    multiple = torch.arange(1, (slots - 1) // size + 1, device=edges.device)
    points = (multiple * size).expand(*edges.shape[:-1], -1).contiguous()
    right = torch.searchsorted(edges, points, right=True).clamp_(max=edges.shape[-1] - 1)
    start, end = edges.gather(-1, right - 1), edges.gather(-1, right)
    inner = multiple - start // size
    if rules.split == "chunk":
        added = start + inner * size
    else:
        length = end - start
        parts = ((length + (size - 1)) // size).clamp_(min=1)
        shorter = length // parts
        # The first `length mod parts` parts are one slot longer.
        added = start + inner * shorter + torch.minimum(inner, length - shorter * parts)
    return torch.cat((edges, torch.minimum(added, end)), dim=-1).sort(dim=-1).values


def _merge_short(edges: Tensor, too_long: bool, rules: SegmentRules) -> Tensor:
    """Drops edges from left to right until no segment is shorter than `min_segment_tokens`.

    From a kept edge the next kept one is the first at least `min_segment_tokens` further on. Which edges are kept is
    therefore a walk along `following`; see `_walk`.
    """
    last, count = edges.shape[-1] - 1, edges[..., -1:]
    following = torch.searchsorted(edges, edges + rules.min_segment_tokens).clamp_(max=last)
    end = edges.gather(-1, following)
    tail = rules.merge == "forward_then_tail"
    if tail:
        # An edge this close to the end would leave a short last segment: step over it, to the end.
        late = end > count - rules.min_segment_tokens
        following = following.masked_fill(late, last)
        end = torch.where(late, count, end)
    kept = _walk(following)
    merged = torch.where(kept, edges, count)
    if tail and too_long:
        # A part that grew beyond the maximum is under twice as long and has lost an edge, which moves to its middle.
        start, at = edges.masked_fill(~kept, -1).cummax(dim=-1)
        end = end.gather(-1, at)
        first_lost = torch.arange(last + 1, device=edges.device) - at == 1
        halve = first_lost & (end - start > rules.max_segment_tokens)
        merged = torch.where(halve, (start + end + 1) // 2, merged)
    return merged.sort(dim=-1).values


def _walk(following: Tensor) -> Tensor:
    """True for the indices met on the way from 0 along `following[i] > i`; the last index leads to itself.

    Leaps double: once everything within n steps is marked, one leap of n steps from all marks reaches twice as far.
    """
    reached = torch.zeros_like(following, dtype=torch.bool)
    reached[..., 0] = True
    for _ in range((following.shape[-1] - 1).bit_length()):
        # What is not marked points at 0, which is.
        reached.scatter_(-1, following * reached, True)
        following = following.gather(-1, following)
    return reached
