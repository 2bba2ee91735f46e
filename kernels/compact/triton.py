"""Triton kernel of compaction, and its launcher."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.tiling import next_power_of_two


@triton.jit(do_not_specialize=["num_slots", "span"])
def _compact_kernel(
    tensor,
    out,
    slots,
    stride_b,
    stride_h,
    stride_t,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    num_heads,
    num_slots,
    span,
    fill,
    WIDTH: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_FILL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # In place one program owns some columns of one head and walks all its slots in order: programs never share a byte.
    i_bh = tl.program_id(1).to(tl.int64)
    o_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_w = o_w < WIDTH
    p_head = tensor + (i_bh // num_heads) * stride_b + (i_bh % num_heads) * stride_h
    p_out = out + (i_bh // num_heads) * stride_out_b + (i_bh % num_heads) * stride_out_h
    first = tl.program_id(2) * span
    for start in range(first, tl.minimum(first + span, num_slots), BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < num_slots
        b_slot = tl.load(slots + i_bh * num_slots + o_n, mask=m_n, other=-1).to(tl.int64)
        m_kept = (b_slot >= 0) & m_n
        m_moved = m_kept
        if IN_PLACE:
            # A row that stays where it is costs no traffic.
            m_moved = m_kept & (b_slot != o_n)
        m_read = m_moved[:, None] & m_w[None, :]
        b_rows = tl.load(p_head + b_slot[:, None] * stride_t + o_w[None, :], mask=m_read, other=0)
        m_write = m_read
        if HAS_FILL:
            b_rows = tl.where(m_kept[:, None], b_rows, tl.full((BLOCK_N, BLOCK_W), fill, b_rows.dtype))
            m_write = m_read | ((m_n & (b_slot < 0))[:, None] & m_w[None, :])
        if IN_PLACE:
            # A thread may be about to read what another is about to overwrite; later tiles read only rows past this one.
            tl.debug_barrier()
        tl.store(p_out + o_n.to(tl.int64)[:, None] * stride_out_t + o_w[None, :], b_rows, mask=m_write)


def compact_triton(
    tensors: Sequence[Tensor],
    slots: Tensor,
    fills: list[float | int | None],
    out: Sequence[Tensor] | None = None,
) -> None:
    """Arguments of `api.compact`; one launch per tensor."""
    slots = slots.contiguous()
    batch, heads, num_slots = slots.shape
    for tensor, fill, target in zip(tensors, fills, tensors if out is None else out):
        rows, target_rows = (x.view(*x.shape[:3], -1) for x in (tensor, target))
        if rows.shape[3] > 1 and rows.stride(3) != 1:
            raise ValueError(f"the Triton kernel moves contiguous rows, got stride {rows.stride(3)} inside one")
        width = rows.shape[3]
        # In place, 64 bytes of a row each: enough programs to use the memory bus when there are few heads.
        block_w = min(next_power_of_two(width), 64 // rows.element_size() if out is None else 128)
        block_n = min(1024, 4096 // block_w)
        span = num_slots if out is None else block_n
        _compact_kernel[(triton.cdiv(width, block_w), batch * heads, triton.cdiv(num_slots, span))](
            rows,
            target_rows,
            slots,
            *rows.stride()[:3],
            *target_rows.stride()[:3],
            heads,
            num_slots,
            span,
            0.0 if fill is None else float(fill),
            WIDTH=width,
            IN_PLACE=out is None,
            HAS_FILL=fill is not None,
            BLOCK_N=block_n,
            BLOCK_W=block_w,
            num_warps=4,
            num_stages=2,
        )
