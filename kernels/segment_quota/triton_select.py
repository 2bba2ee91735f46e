"""Triton kernel that picks the slots of planned segments, one program a head, and its launcher."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.tiling import next_power_of_two


@triton.jit
def _best(b_priority, b_segment, b_before, b_edge, b_quota):
    """Marks the b_quota best of each segment, ascending priority, then ascending slot.

    b_priority and b_segment int32 [BLOCK_T]; b_before and b_edge [BLOCK_R]: slots before a segment and up to its end;
    b_quota int32 [BLOCK_R]. The priority of the last slot to keep is found bit by bit for all segments at once: it is the
    largest value that fewer than b_quota slots lie below.
    """
    b_least = tl.full(b_quota.shape, -0x80000000, tl.int32)
    for step in range(32):
        # Flips the sign bit to 0 first, then the other bits to 1: upwards from the smallest integer.
        b_try = b_least ^ (tl.full((), 1, tl.int32) << (31 - step))
        b_below = (b_priority < tl.gather(b_try, b_segment, 0)).to(tl.int32)
        b_least = tl.where(_count(b_below, b_before, b_edge) < b_quota, b_try, b_least)
    b_limit = tl.gather(b_least, b_segment, 0)
    b_below = (b_priority < b_limit).to(tl.int32)
    b_equal = (b_priority == b_limit).to(tl.int32)
    b_left = b_quota - _count(b_below, b_before, b_edge)
    b_running = tl.cumsum(b_equal, 0)
    b_earlier = tl.where(b_before > 0, tl.gather(b_running, tl.maximum(b_before - 1, 0), 0), 0)
    b_place = b_running - tl.gather(b_earlier, b_segment, 0)
    return (b_below > 0) | ((b_equal > 0) & (b_place <= tl.gather(b_left, b_segment, 0)))


@triton.jit
def _count(b_flags, b_before, b_edge):
    """How many flags are set in each segment."""
    b_running = tl.cumsum(b_flags, 0)
    b_to_end = tl.where(b_edge > 0, tl.gather(b_running, tl.maximum(b_edge - 1, 0), 0), 0)
    return b_to_end - tl.where(b_before > 0, tl.gather(b_running, tl.maximum(b_before - 1, 0), 0), 0)


@triton.jit(do_not_specialize=["num_slots", "num_segments", "width"])
def _segment_select_kernel(
    scores, slot_edges, quotas, num_first, first_recent, valid, slots, num_slots, num_segments, width,
    HAS_VALID: tl.constexpr, AFTER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BLOCK_T)
    o_r = tl.arange(0, BLOCK_R)
    m_t = o_t < num_slots
    m_r = o_r < num_segments
    b_present = m_t
    if HAS_VALID:
        b_present = tl.load(valid + i_bh * num_slots + o_t, mask=m_t, other=0) != 0
    b_rank = tl.cumsum(b_present.to(tl.int32), 0)
    is_first = b_rank <= tl.load(num_first + i_bh)
    b_must = (is_first | (b_rank > tl.load(first_recent + i_bh))) & b_present

    p_edges = slot_edges + i_bh * (num_segments + 1)
    b_before = tl.load(p_edges + o_r, mask=m_r, other=0).to(tl.int32)
    b_edge = tl.load(p_edges + 1 + o_r, mask=m_r, other=0).to(tl.int32)
    b_quota = tl.load(quotas + i_bh * num_segments + o_r, mask=m_r, other=0).to(tl.int32)
    b_segment = tl.zeros_like(o_t)
    for index in range(1, num_segments):
        b_segment += (o_t >= tl.load(p_edges + index).to(tl.int32)).to(tl.int32)

    b_score = tl.load(scores + i_bh * num_slots + o_t, mask=m_t, other=float("-inf"))
    # As the torch path: infinities count as the largest floats, NaN as less than all, -0.0 as 0.0.
    b_finite = tl.minimum(tl.maximum(b_score, -3.4028234663852886e38), 3.4028234663852886e38) + 0.0
    bits = tl.where(b_score == b_score, b_finite, float("-inf")).to(tl.int32, bitcast=True)
    # Bits of floats order as integers once the magnitude of negative ones is flipped; the complement turns them round.
    b_priority = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    if AFTER:
        b_candidate = tl.where(b_present, b_priority, 0x7FFFFFFF)
        b_kept = _best(b_candidate, b_segment, b_before, b_edge, b_quota) & b_present
        b_priority = tl.where(b_must, -0x80000000, tl.where(b_kept, b_priority, 0x7FFFFFFF))
        b_whole = tl.where(o_r == 0, tl.sum(b_quota, 0), 0)
        b_end = tl.where(o_r == 0, num_slots, 0)
        b_kept = _best(b_priority, tl.zeros_like(o_t), tl.zeros_like(o_r), b_end, b_whole)
    else:
        b_priority = tl.where(b_present, tl.where(b_must, -0x80000000, b_priority), 0x7FFFFFFF)
        b_kept = _best(b_priority, b_segment, b_before, b_edge, b_quota)
    b_kept = b_kept & b_present

    b_place = tl.cumsum(b_kept.to(tl.int32), 0)
    p_slots = slots + i_bh * width
    tl.store(p_slots + b_place - 1, o_t.to(tl.int64), mask=b_kept & (b_place <= width))
    o_w = tl.arange(0, BLOCK_W)
    tl.store(p_slots + o_w, tl.full((BLOCK_W,), -1, tl.int64), mask=(o_w >= tl.max(b_place, 0)) & (o_w < width))


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
    slots = torch.empty(batch, heads, width, dtype=torch.int64, device=scores.device)
    block_t = next_power_of_two(num_slots)
    _segment_select_kernel[(batch * heads,)](
        scores.contiguous(),
        slot_edges.contiguous(),
        quotas.contiguous(),
        num_first.contiguous(),
        first_recent.contiguous(),
        None if valid is None else valid.contiguous(),
        slots,
        num_slots,
        segments,
        width,
        HAS_VALID=valid is not None,
        AFTER=must_keep == "after",
        BLOCK_T=block_t,
        BLOCK_R=max(2, next_power_of_two(segments)),
        BLOCK_W=next_power_of_two(width),
        num_warps=min(16, max(4, block_t // 256)),
    )
    return slots
