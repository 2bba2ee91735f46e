"""Integer quotas of segments: water filling, and the public code's rounding; plain torch, no loop, no host sync.

All tensors are float64 `[B, H, R]` and hold integers, one entry a segment, weights and masses aside; a segment of zero
length gets no slot. `keep` is `[B, H, 1]`.
"""

import math

import torch
from torch import Tensor

# Up to this many segments every bend is evaluated at once; beyond, in two steps, so that memory does not grow squared.
_ALL_AT_ONCE = 16
# Fractions are compared to a millionth of a slot, so that equal ones tie on every machine.
_FRACTION_STEPS = float(2**20)


def water_fill(
    lengths: Tensor, weights: Tensor, must: Tensor, keep: Tensor, floor: int, may_fail: bool = True
) -> Tensor:
    """Quotas `clip(base + theta * w, low, L)` with the one theta that spends `keep`, rounded by largest fraction.

    `base = min(floor, L)` is every segment's floor, `low = max(base, must)`. Where the floors cost more than `keep`,
    the highest level c with `sum max(must, min(base, c)) <= keep` replaces them and the rest goes one each to segments
    below their floor, by descending weight.

    Args:
        lengths: slots of each segment; their sum is at least `keep`.
        weights: not negative; if all are 0, lengths take their place.
        must: slots of each segment that are kept in any case; their sum is at most `keep`.
        floor: slots that each segment should keep.
        may_fail: False if the caller knows that the floors are always affordable, which saves the work for the rest.

    Returns: `must <= quota <= length`, summing to `keep`.
    """
    base = lengths.clamp(max=floor)
    low, high = torch.maximum(base, must), lengths
    if may_fail:
        base, low, high = _lower_floors(base, low, high, must, keep, floor)
    weights = weights.add(lengths, alpha=1e-30)
    # Segments of zero length, of which a head may have nothing else, keep a weight above zero: 0 / 0 would spread.
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-300) + 1e-300
    return _round_to_total(_fill(base, low, high, weights, keep), weights, keep)


def _lower_floors(
    base: Tensor, low: Tensor, high: Tensor, must: Tensor, keep: Tensor, floor: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`base`, `low` and `high` of `water_fill` where the floors do not fit; unchanged where they do."""
    levels = torch.arange(floor + 1, device=base.device, dtype=base.dtype)[:, None]
    cost = torch.maximum(must[..., None, :], torch.minimum(base[..., None, :], levels)).sum(dim=-1)
    level = (cost <= keep).sum(dim=-1, keepdim=True) - 1
    lowered = torch.maximum(must, torch.minimum(base, level))
    short = level < floor
    one_more = lowered + (base > lowered)
    return torch.where(short, lowered, base), torch.where(short, lowered, low), torch.where(short, one_more, high)


def _fill(base: Tensor, low: Tensor, high: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    """`clip(base + theta * weights, low, high)` summing to `keep`, exact up to rounding.

    The sum rises piecewise linearly in theta and bends only where a segment leaves `low` or reaches `high`. It is
    evaluated at every bend; from the last bend at or below `keep` the slope is known and one step reaches `keep`.
    """
    leaves, reaches = (low - base) / weights, (high - base) / weights
    bends = torch.cat((leaves, reaches), dim=-1)
    if bends.shape[-1] > 2 * _ALL_AT_ONCE:
        bends = _near_the_last_affordable(bends, base, low, high, weights, keep)
    theta = bends.masked_fill(_spent(bends, base, low, high, weights) > keep, 0.0).amax(dim=-1, keepdim=True)
    reached = torch.addcmul(base, theta, weights).clamp_(low, high).sum(dim=-1, keepdim=True)
    rising = (leaves <= theta) & (theta < reaches)
    slope = (weights * rising).sum(dim=-1, keepdim=True)
    # Where nothing rises `keep` is met already, up to rounding that must not be divided by zero.
    theta = theta + (keep - reached) / slope.masked_fill(slope == 0, math.inf)
    return torch.addcmul(base, theta, weights).clamp_(low, high)


def _spent(thetas: Tensor, base: Tensor, low: Tensor, high: Tensor, weights: Tensor) -> Tensor:
    """The sum that each theta spends: `[B, H, thetas]`."""
    filled = torch.addcmul(base[..., None, :], thetas[..., None], weights[..., None, :])
    return filled.clamp_(low[..., None, :], high[..., None, :]).sum(dim=-1)


def _near_the_last_affordable(
    bends: Tensor, base: Tensor, low: Tensor, high: Tensor, weights: Tensor, keep: Tensor
) -> Tensor:
    """About sqrt(bends) neighbouring bends, among them the last that is affordable (or the first of all)."""
    number = bends.shape[-1]
    stride = math.isqrt(number) + 1
    bends = bends.sort(dim=-1).values
    affordable = (_spent(bends[..., ::stride], base, low, high, weights) <= keep).sum(dim=-1, keepdim=True)
    place = (affordable - 1).clamp(min=0) * stride + torch.arange(stride, device=bends.device)
    return bends.gather(-1, place.clamp_(max=number - 1))


def _round_to_total(filled: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    """Floors, then one more for the largest fractions, then the larger weights, then the lower indices."""
    # Fewer units are left than segments have a fraction, so no segment passes its bounds.
    whole = (filled + 1e-9).floor()
    steps = ((filled - whole) * _FRACTION_STEPS).round()
    # Weights are at most 1: half of one never outweighs a step.
    order = (steps + 0.5 * weights).argsort(dim=-1, descending=True, stable=True)
    return whole + (order.argsort(dim=-1) < keep - whole.sum(dim=-1, keepdim=True))


def public_quotas(lengths: Tensor, masses: Tensor, must: Tensor, keep: Tensor, floor: int) -> Tensor:
    """Quotas as the public AMS code rounds them: half to even, then one at a time from segment 0 on.

    Where the floors cost more than `keep`, the first segments lose first. With more segments than `keep` the public
    code never returns; here the first segments then get nothing.

    Args and returns: as in `water_fill`; the public code knows no `must`, which here only raises floors.
    """
    base = torch.maximum(lengths.clamp(max=floor), must)
    share = (keep - base.sum(dim=-1, keepdim=True)).clamp(min=0)
    extra = (share * masses / (masses.sum(dim=-1, keepdim=True) + 1e-12)).round()
    quotas = torch.minimum(base + extra, lengths)
    one_each = torch.maximum(base.clamp(max=1), must)
    for least in (base, one_each, must):
        spare = (quotas - least).clamp(min=0)
        surplus = (quotas.sum(dim=-1, keepdim=True) - keep).clamp(min=0)
        quotas = quotas - one_at_a_time(spare, torch.minimum(surplus, spare.sum(dim=-1, keepdim=True)))
    return quotas + one_at_a_time(lengths - quotas, keep - quotas.sum(dim=-1, keepdim=True))


def one_at_a_time(capacity: Tensor, units: Tensor) -> Tensor:
    """How many of `units` each entry takes when they are dealt one each, round after round, in index order.

    Args:
        capacity: `[..., R]` what an entry can take at most.
        units: `[..., 1]` at most the sum of the capacities.
    """
    taken_by = torch.minimum(capacity[..., None], capacity[..., None, :]).sum(dim=-1)
    # Entries fill up to a common level: the highest capacity whose level is affordable, then whole rounds above it.
    level = capacity.masked_fill(taken_by > units, 0.0).amax(dim=-1, keepdim=True)
    left = units - torch.minimum(capacity, level).sum(dim=-1, keepdim=True)
    still_open = capacity > level
    number = still_open.sum(dim=-1, keepdim=True).clamp(min=1)
    level = level + left // number
    served = still_open & (still_open.cumsum(dim=-1) <= left % number)
    return torch.minimum(capacity, level) + served
