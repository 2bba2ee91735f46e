"""Triton kernel that picks the slots of planned segments, one program a head, and its launcher."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.tiling import next_power_of_two

# Slots of a tile; a head of more is walked tile by tile.
_LARGEST_TILE = 4096


@triton.jit
def _before(b_flags, b_edge, start):
    """How many flags of the tile that begins at slot `start` are set before each edge; int32 [BLOCK_R]."""
    o_edge = tl.minimum(tl.maximum(b_edge - start, 0), b_flags.shape[0])
    return tl.where(o_edge > 0, tl.gather(tl.cumsum(b_flags, 0), tl.maximum(o_edge - 1, 0), 0), 0)


@triton.jit
def _find_limits(p_priority, p_segment, b_start, b_end, b_quota, num_slots, BLOCK_T: tl.constexpr):
    """The priority of the last slot that each segment keeps: the largest integer that fewer than b_quota lie below.

    It is built bit by bit, for all segments at once; the second result is how many do lie below it.
    """
    b_limit = tl.full(b_quota.shape, -0x80000000, tl.int32)
    b_below = tl.zeros_like(b_quota)
    for step in range(32):
        # Flips the sign bit to 0 first, then the other bits to 1: upwards from the smallest integer.
        b_try = b_limit ^ (tl.full((), 1, tl.int32) << (31 - step))
        b_count = tl.zeros_like(b_quota)
        for start in range(0, num_slots, BLOCK_T):
            o_t = start + tl.arange(0, BLOCK_T)
            b_priority = tl.load(p_priority + o_t, mask=o_t < num_slots, other=0x7FFFFFFF)
            b_segment = tl.load(p_segment + o_t, mask=o_t < num_slots, other=0) & 0xFFFFFF
            b_flags = (b_priority < tl.gather(b_try, b_segment, 0)).to(tl.int32)
            b_count += _before(b_flags, b_end, start) - _before(b_flags, b_start, start)
        fits = b_count < b_quota
        b_limit = tl.where(fits, b_try, b_limit)
        b_below = tl.where(fits, b_count, b_below)
    return b_limit, b_below


@triton.jit
def _is_kept(b_priority, b_segment, b_limit, b_left, b_start, start):
    """Marks the slots of a tile below the limits, and of those at the limit the first b_left of their segment.

    The second result flags all that are at the limit; b_left must be lowered by them before the next tile.
    """
    b_own_limit = tl.gather(b_limit, b_segment, 0)
    b_equal = (b_priority == b_own_limit).to(tl.int32)
    b_place = tl.cumsum(b_equal, 0) - tl.gather(_before(b_equal, b_start, start), b_segment, 0)
    is_kept = (b_priority < b_own_limit) | ((b_equal > 0) & (b_place <= tl.gather(b_left, b_segment, 0)))
    return is_kept, b_equal


@triton.jit(do_not_specialize=["num_slots", "num_segments", "width"])
def _segment_select_kernel(
    scores, slot_edges, quotas, num_first, first_recent, valid, slots, priority, segment,
    num_slots, num_segments, width,
    HAS_VALID: tl.constexpr, AFTER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    o_tile = tl.arange(0, BLOCK_T)
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < num_segments
    p_edges = slot_edges + i_bh * (num_segments + 1)
    b_start = tl.load(p_edges + o_r, mask=m_r, other=0).to(tl.int32)
    b_end = tl.load(p_edges + 1 + o_r, mask=m_r, other=0).to(tl.int32)
    b_quota = tl.load(quotas + i_bh * num_segments + o_r, mask=m_r, other=0).to(tl.int32)
    p_priority = priority + i_bh * num_slots
    p_segment = segment + i_bh * num_slots
    first, recent = tl.load(num_first + i_bh), tl.load(first_recent + i_bh)

    # Every thread reads back only what it wrote itself: tiles are always laid out alike.
    rank = num_slots * 0
    for start in range(0, num_slots, BLOCK_T):
        o_t = start + o_tile
        m_t = o_t < num_slots
        b_present = m_t
        if HAS_VALID:
            b_present = tl.load(valid + i_bh * num_slots + o_t, mask=m_t, other=0) != 0
        b_rank = rank + tl.cumsum(b_present.to(tl.int32), 0)
        rank = tl.max(b_rank, 0)
        b_must = ((b_rank <= first) | (b_rank > recent)) & b_present
        b_segment = tl.zeros_like(o_t)
        for index in range(1, num_segments):
            b_segment += (o_t >= tl.load(p_edges + index).to(tl.int32)).to(tl.int32)

        b_score = tl.load(scores + i_bh * num_slots + o_t, mask=m_t, other=float("-inf"))
        # As the torch path: infinities count as the largest floats, NaN as less than all, -0.0 as 0.0.
        b_finite = tl.minimum(tl.maximum(b_score, -3.4028234663852886e38), 3.4028234663852886e38) + 0.0
        bits = tl.where(b_score == b_score, b_finite, float("-inf")).to(tl.int32, bitcast=True)
        # Bits of floats order as integers once the magnitude of negative ones is flipped; ~ makes the best the least.
        b_priority = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        if not AFTER:
            b_priority = tl.where(b_must, -0x80000000, b_priority)
        tl.store(p_priority + o_t, tl.where(b_present, b_priority, 0x7FFFFFFF), mask=m_t)
        tl.store(p_segment + o_t, b_segment | (b_must.to(tl.int32) << 24), mask=m_t)

    b_limit, b_below = _find_limits(p_priority, p_segment, b_start, b_end, b_quota, num_slots, BLOCK_T)
    b_left = b_quota - b_below
    if AFTER:
        # Segments have named candidates as if nothing were protected; now the head is one segment, and protected slots
        # come first.
        for start in range(0, num_slots, BLOCK_T):
            o_t = start + o_tile
            m_t = o_t < num_slots
            b_priority = tl.load(p_priority + o_t, mask=m_t, other=0x7FFFFFFF)
            b_segment = tl.load(p_segment + o_t, mask=m_t, other=0)
            b_kept, b_equal = _is_kept(b_priority, b_segment & 0xFFFFFF, b_limit, b_left, b_start, start)
            b_left -= _before(b_equal, b_end, start) - _before(b_equal, b_start, start)
            b_priority = tl.where(b_kept, b_priority, 0x7FFFFFFF)
            tl.store(p_priority + o_t, tl.where(b_segment >> 24 > 0, -0x80000000, b_priority), mask=m_t)
            tl.store(p_segment + o_t, tl.zeros_like(o_t), mask=m_t)
        b_start = tl.zeros_like(o_r)
        b_end = tl.where(o_r == 0, num_slots, 0)
        b_quota = tl.where(o_r == 0, tl.sum(b_quota, 0), 0)
        b_limit, b_below = _find_limits(p_priority, p_segment, b_start, b_end, b_quota, num_slots, BLOCK_T)
        b_left = b_quota - b_below

    p_slots = slots + i_bh * width
    total = num_slots * 0
    for start in range(0, num_slots, BLOCK_T):
        o_t = start + o_tile
        m_t = o_t < num_slots
        b_priority = tl.load(p_priority + o_t, mask=m_t, other=0x7FFFFFFF)
        b_segment = tl.load(p_segment + o_t, mask=m_t, other=0) & 0xFFFFFF
        b_kept, b_equal = _is_kept(b_priority, b_segment, b_limit, b_left, b_start, start)
        b_left -= _before(b_equal, b_end, start) - _before(b_equal, b_start, start)
        b_kept = b_kept & (b_priority < 0x7FFFFFFF)
        b_place = total + tl.cumsum(b_kept.to(tl.int32), 0)
        tl.store(p_slots + b_place - 1, o_t.to(tl.int64), mask=b_kept & (b_place <= width))
        total = tl.max(b_place, 0)
    for start in range(0, width, BLOCK_T):
        o_w = start + o_tile
        tl.store(p_slots + o_w, tl.full((BLOCK_T,), -1, tl.int64), mask=(o_w >= total) & (o_w < width))


def segment_select_triton(
    scores: Tensor,
    slot_edges: Tensor,
    quotas: Tensor,
    num_first: Tensor,
    first_recent: Tensor,
    valid: Tensor | None,
    must_keep: str,
    width: int,
) -> Tensor:
    """Arguments and result of `api.segment_select`."""
    batch, heads, num_slots = scores.shape
    segments = quotas.shape[-1]
    new = lambda last, dtype: torch.empty(batch, heads, last, dtype=dtype, device=scores.device)
    slots = new(width, torch.int64)
    block_t = min(_LARGEST_TILE, next_power_of_two(num_slots))
    _segment_select_kernel[(batch * heads,)](
        scores.contiguous(),
        slot_edges.contiguous(),
        quotas.contiguous(),
        num_first.contiguous(),
        first_recent.contiguous(),
        None if valid is None else valid.contiguous(),
        slots,
        new(num_slots, torch.int32),
        new(num_slots, torch.int32),
        num_slots,
        segments,
        width,
        HAS_VALID=valid is not None,
        AFTER=must_keep == "after",
        BLOCK_T=block_t,
        BLOCK_R=max(2, next_power_of_two(segments)),
        num_warps=min(16, max(4, block_t // 128)),
    )
    return slots
