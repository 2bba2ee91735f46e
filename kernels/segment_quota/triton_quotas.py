"""Device functions that turn segment lengths and masses into integer quotas; see `quotas.py` for what they compute.

Everything is float64 `[BLOCK_R]`, zero past the last segment. Where the torch path sorts or compares all pairs, these
halve an interval: what is searched is monotone, and a head has one program to itself.
"""

import triton
import triton.language as tl

# The largest finite float64, as bits.
LARGEST_BITS = tl.constexpr(0x7FEFFFFFFFFFFFFF)


@triton.jit
def round_half_even(b_x):
    # Adding 1.5 * 2**52 leaves no bits for a fraction; the addition itself rounds half to even.
    return (b_x + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def water_fill(b_length, b_weight, b_must, keep, FLOOR: tl.constexpr):
    """See `quotas.water_fill`."""
    b_base = tl.minimum(b_length, FLOOR * 1.0)
    level = _highest_level(b_base, b_must, keep, FLOOR)
    b_lowered = tl.maximum(b_must, tl.minimum(b_base, level * 1.0))
    short = level < FLOOR
    b_low = tl.where(short, b_lowered, tl.maximum(b_base, b_must))
    b_high = tl.where(short, b_lowered + tl.where(b_base > b_lowered, 1.0, 0.0), b_length)
    b_base = tl.where(short, b_lowered, b_base)

    b_weight = b_weight + b_length * 1e-30
    b_weight = b_weight / tl.maximum(tl.sum(b_weight, 0), 1e-300) + 1e-300
    b_leaves = (b_low - b_base) / b_weight
    b_reaches = (b_high - b_base) / b_weight
    limit = _largest_affordable(b_base, b_low, b_high, b_weight, keep)
    theta = tl.maximum(
        tl.max(tl.where(b_leaves <= limit, b_leaves, 0.0), 0), tl.max(tl.where(b_reaches <= limit, b_reaches, 0.0), 0)
    )
    slope = tl.sum(tl.where((b_leaves <= theta) & (theta < b_reaches), b_weight, 0.0), 0)
    missing = keep - tl.sum(_clip(b_base + theta * b_weight, b_low, b_high), 0)
    theta = theta + tl.where(slope > 0, missing / tl.where(slope > 0, slope, 1.0), 0.0)
    b_filled = _clip(b_base + theta * b_weight, b_low, b_high)

    b_whole = tl.floor(b_filled + 1e-9)
    b_steps = round_half_even((b_filled - b_whole) * 1048576.0)
    b_order = tl.where(b_length > 0, b_steps + b_weight * 0.5, -1.0)
    return b_whole + _largest(b_order, keep - tl.sum(b_whole, 0))


@triton.jit
def public_quotas(b_length, b_mass, b_must, keep, FLOOR: tl.constexpr):
    """See `quotas.public_quotas`."""
    b_base = tl.maximum(tl.minimum(b_length, FLOOR * 1.0), b_must)
    share = tl.maximum(keep - tl.sum(b_base, 0), 0.0)
    b_extra = round_half_even(share * b_mass / (tl.sum(b_mass, 0) + 1e-12))
    b_quota = tl.minimum(b_base + b_extra, b_length)
    b_quota = _give_back(b_quota, b_base, keep)
    b_quota = _give_back(b_quota, tl.maximum(tl.minimum(b_base, 1.0), b_must), keep)
    b_quota = _give_back(b_quota, b_must, keep)
    return b_quota + _one_at_a_time(b_length - b_quota, keep - tl.sum(b_quota, 0))


@triton.jit
def _give_back(b_quota, b_least, keep):
    b_spare = tl.maximum(b_quota - b_least, 0.0)
    surplus = tl.maximum(tl.sum(b_quota, 0) - keep, 0.0)
    return b_quota - _one_at_a_time(b_spare, tl.minimum(surplus, tl.sum(b_spare, 0)))


@triton.jit
def _one_at_a_time(b_capacity, units):
    """See `quotas.one_at_a_time`."""
    low = units.to(tl.int64) * 0
    high = tl.max(b_capacity, 0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) // 2
        fits = tl.sum(tl.minimum(b_capacity, middle.to(tl.float64)), 0) <= units
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    level = low.to(tl.float64)
    b_taken = tl.minimum(b_capacity, level)
    left = units - tl.sum(b_taken, 0)
    b_open = b_capacity > level
    return b_taken + tl.where(b_open & (tl.cumsum(b_open.to(tl.int32), 0) <= left), 1.0, 0.0)


@triton.jit
def _highest_level(b_base, b_must, keep, FLOOR: tl.constexpr):
    """The highest floor in [0, FLOOR] that `keep` can pay for."""
    low = keep.to(tl.int32) * 0
    high = low + FLOOR
    while low < high:
        middle = (low + high + 1) // 2
        fits = tl.sum(tl.maximum(b_must, tl.minimum(b_base, middle.to(tl.float64))), 0) <= keep
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low


@triton.jit
def _largest_affordable(b_base, b_low, b_high, b_weight, keep):
    """The largest theta whose sum does not exceed `keep`; non-negative floats are halved as their bits."""
    low = keep.to(tl.int64) * 0
    high = low + LARGEST_BITS
    while low < high:
        middle = low + (high - low + 1) // 2
        theta = middle.to(tl.float64, bitcast=True)
        fits = tl.sum(_clip(b_base + theta * b_weight, b_low, b_high), 0) <= keep
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low.to(tl.float64, bitcast=True)


@triton.jit
def _largest(b_order, count):
    """1.0 at the `count` largest entries, lower indices first among equals; negative entries take no part."""
    low = count.to(tl.int64) * 0
    high = low + LARGEST_BITS
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum(tl.where(b_order >= middle.to(tl.float64, bitcast=True), 1.0, 0.0), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    least = low.to(tl.float64, bitcast=True)
    b_above = b_order > least
    b_equal = b_order == least
    left = count - tl.sum(tl.where(b_above, 1.0, 0.0), 0)
    b_served = b_equal & (tl.cumsum(b_equal.to(tl.int32), 0) <= left)
    return tl.where(b_above | b_served, 1.0, 0.0)


@triton.jit
def _clip(b_x, b_low, b_high):
    return tl.minimum(tl.maximum(b_x, b_low), b_high)
