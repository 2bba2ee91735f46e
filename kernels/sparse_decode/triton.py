"""Triton kernels of sparse decoding, and their launcher. Logits are in units of log2 throughout.

Flash-decoding: `_sparse_decode_split_kernel` gives each part of a slot list to a program of its own, with the query
heads of the selection folded into rows; `_merge_splits_kernel` joins the parts by their log-sum-exps;
`_top_slots_kernel` turns stored logits into the largest mean weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.running_topk import empty_list, insert_tile, key_indices, key_scores, may_enter
from kvstitch.kernels.common.softcap import softcap_log2
from kvstitch.kernels.common.tiling import dot_precision, next_power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)
# Programs to aim for where there are no multiprocessors to count (Triton's interpreter).
_INTERPRETED_MULTIPROCESSORS = 8
_MAX_SPLITS = 64


@triton.jit(do_not_specialize=["num_slots", "split_slots"])
def _sparse_decode_split_kernel(
    query,
    keys,
    values,
    slots,
    part_output,
    part_logsumexp,
    logits,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    num_selections,
    num_slots,
    split_slots,
    scaling_log2,
    softcap,
    ROWS: tl.constexpr,
    SELECTIONS_PER_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STORE_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_bs = tl.program_id(1).to(tl.int64)
    i_b = i_bs // num_selections
    i_s = i_bs % num_selections
    i_h = i_s // SELECTIONS_PER_HEAD

    o_r = tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < ROWS
    m_d = o_d < HEAD_DIM
    p_q = query + i_b * stride_qb + (i_s * ROWS + o_r)[:, None] * stride_qh + o_d[None, :]
    b_q = tl.load(p_q, mask=m_r[:, None] & m_d[None, :], other=0.0)
    p_k = keys + i_b * stride_kb + i_h * stride_kh + o_d[None, :]
    p_v = values + i_b * stride_vb + i_h * stride_vh + o_d[None, :]

    b_max = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_R,), tl.float32)
    b_output = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    first = i_split * split_slots
    last = tl.minimum(first + split_slots, num_slots)
    for start in range(first, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_slot = tl.load(slots + i_bs * num_slots + o_n, mask=o_n < last, other=-1).to(tl.int64)
        m_n = b_slot >= 0
        m_rows = m_n[:, None] & m_d[None, :]
        b_k = tl.load(p_k + b_slot[:, None] * stride_kt, mask=m_rows, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scaling_log2
        if HAS_SOFTCAP:
            b_s = softcap_log2(b_s, softcap)
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        if STORE_LOGITS:
            p_logits = logits + (i_bs * ROWS + o_r)[:, None] * num_slots + o_n[None, :]
            tl.store(p_logits, b_s, mask=m_r[:, None] & (o_n < last)[None, :])
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_scale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_scale + tl.sum(b_p, 1)
        b_v = tl.load(p_v + b_slot[:, None] * stride_vt, mask=m_rows, other=0.0)
        b_output = b_output * b_scale[:, None]
        b_output = tl.dot(b_p.to(b_v.dtype), b_v, b_output, input_precision=PRECISION)
        b_max = b_new_max

    m_seen = b_max > float("-inf")
    b_sum = tl.where(m_seen, b_sum, 1.0)
    o_row = (i_bs * ROWS + o_r) * tl.num_programs(0) + i_split
    tl.store(part_logsumexp + o_row, tl.where(m_seen, b_max + tl.log2(b_sum), float("-inf")), mask=m_r)
    p_o = part_output + o_row[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_o, b_output / b_sum[:, None], mask=m_r[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    part_output,
    part_logsumexp,
    sink_logits,
    output,
    logsumexp,
    num_query_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_bq = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_s = o_s < num_splits
    b_part = tl.load(part_logsumexp + i_bq * num_splits + o_s, mask=m_s, other=float("-inf"))
    b_peak = tl.max(b_part, 0)
    if HAS_SINK_LOGITS:
        b_sink = tl.load(sink_logits + i_bq % num_query_heads).to(tl.float32) * LOG2_E
        b_peak = tl.maximum(b_peak, b_sink)
    b_peak = tl.where(b_peak == float("-inf"), 0.0, b_peak)
    b_weight = tl.exp2(b_part - b_peak)
    b_total = tl.sum(b_weight, 0)
    if HAS_SINK_LOGITS:
        b_total += tl.exp2(b_sink - b_peak)
    seen = b_total > 0
    b_total = tl.where(seen, b_total, 1.0)
    p_part = part_output + (i_bq * num_splits + o_s)[:, None] * HEAD_DIM + o_d[None, :]
    b_parts = tl.load(p_part, mask=m_s[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    b_output = tl.sum(b_parts * b_weight[:, None], 0) / b_total
    tl.store(output + i_bq * HEAD_DIM + o_d, b_output.to(output.dtype.element_ty), mask=o_d < HEAD_DIM)
    tl.store(logsumexp + i_bq, tl.where(seen, b_peak + tl.log2(b_total), float("-inf")))


@triton.jit(do_not_specialize=["num_slots", "first_candidate"])
def _top_slots_kernel(
    logits,
    logsumexp,
    slots,
    top_weights,
    top_slots,
    num_slots,
    first_candidate,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
):
    i_bs = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < ROWS
    # Rows that stand for no head weigh nothing.
    b_logsumexp = tl.load(logsumexp + i_bs * ROWS + o_r, mask=m_r, other=float("inf"))
    # Neither do heads that saw nothing.
    b_logsumexp = tl.where(b_logsumexp > float("-inf"), b_logsumexp, float("inf"))
    b_keys = empty_list(1, K)
    for start in range(0, num_slots, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < num_slots
        b_slot = tl.load(slots + i_bs * num_slots + o_n, mask=m_n, other=-1).to(tl.int32)
        p_logits = logits + (i_bs * ROWS + o_r)[:, None] * num_slots + o_n[None, :]
        b_s = tl.load(p_logits, mask=m_r[:, None] & m_n[None, :], other=float("-inf"))
        b_mean = tl.sum(tl.exp2(b_s - b_logsumexp[:, None]), 0) * (1.0 / ROWS)
        b_score = tl.where((b_slot >= 0) & (o_n >= first_candidate) & (b_mean > 0), b_mean, float("-inf"))
        b_score = tl.expand_dims(b_score, 0)
        if may_enter(b_keys, tl.max(b_score, 1)):
            b_keys = insert_tile(b_keys, b_score, tl.expand_dims(b_slot, 0))
    b_keys = tl.sort(b_keys, descending=True)
    b_weights = tl.maximum(key_scores(b_keys), 0.0)
    o_k = tl.arange(0, K)[None, :]
    o_out = i_bs * TOP_K + o_k
    tl.store(top_weights + o_out, b_weights, mask=o_k < TOP_K)
    tl.store(top_slots + o_out, tl.where(b_weights > 0, key_indices(b_keys), -1), mask=o_k < TOP_K)


def sparse_decode_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    top_k: int,
    first_candidate: int,
    return_logsumexp: bool = False,
    num_splits: int | None = None,
    block_n: int = 64,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of `api.sparse_decode`.

    Args:
        num_splits: parts of a slot list; None: as many as fill the device twice.
        block_n: slots of a tile.
    """
    batch, query_heads, _, head_dim = query.shape
    if keys.stride(-1) != 1 or values.stride(-1) != 1 or values.shape[-1] != head_dim:
        raise ValueError(
            f"the Triton kernel needs keys and values of one head dim and contiguous rows, got {list(keys.shape)} with "
            f"strides {keys.stride()} and {list(values.shape)} with strides {values.stride()}"
        )
    query, slots = query.contiguous(), slots.contiguous()
    selections, num_slots = slots.shape[1:]
    rows = query_heads // selections
    # Wide slots and many query heads fill the registers: sm_80 spills with 32 float32 slots of 256 numbers, sm_90 with 32 of
    # 128 for 32 heads.
    block_n = min(block_n, max(16, 64 >> ((query.element_size() == 4) + (head_dim > 128) + (rows > 16))))
    splits = num_splits or _choose_splits(batch * selections, num_slots, block_n, query.device)
    split_slots = triton.cdiv(triton.cdiv(num_slots, block_n), splits) * block_n
    splits = triton.cdiv(num_slots, split_slots)

    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=query.device)
    part_output = new(batch, query_heads, splits, head_dim)
    part_logsumexp = new(batch, query_heads, splits)
    logits = new(batch, query_heads, num_slots) if top_k else None
    block_d = max(16, next_power_of_two(head_dim))
    _sparse_decode_split_kernel[(splits, batch * selections)](
        query,
        keys,
        values,
        slots,
        part_output,
        part_logsumexp,
        logits,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        selections,
        num_slots,
        split_slots,
        scaling * LOG2_E.value,
        0.0 if softcap is None else softcap * LOG2_E.value,
        ROWS=rows,
        SELECTIONS_PER_HEAD=selections // keys.shape[1],
        HEAD_DIM=head_dim,
        HAS_SOFTCAP=softcap is not None,
        STORE_LOGITS=top_k > 0,
        PRECISION=dot_precision(query),
        BLOCK_R=max(16, next_power_of_two(rows)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=3,
    )
    output = torch.empty_like(query)
    logsumexp = new(batch, query_heads)
    _merge_splits_kernel[(batch * query_heads,)](
        part_output,
        part_logsumexp,
        sink_logits,
        output,
        logsumexp,
        query_heads,
        splits,
        HEAD_DIM=head_dim,
        HAS_SINK_LOGITS=sink_logits is not None,
        BLOCK_S=max(2, next_power_of_two(splits)),
        BLOCK_D=block_d,
        num_warps=4,
    )
    natural = logsumexp / LOG2_E.value if return_logsumexp else None
    if not top_k:
        return output, None, None, natural
    top_weights = new(batch, selections, top_k)
    top_slots = torch.empty(batch, selections, top_k, dtype=torch.int32, device=query.device)
    _top_slots_kernel[(batch * selections,)](
        logits,
        logsumexp,
        slots,
        top_weights,
        top_slots,
        num_slots,
        first_candidate,
        ROWS=rows,
        TOP_K=top_k,
        BLOCK_R=next_power_of_two(rows),
        BLOCK_N=1024,
        K=max(2, next_power_of_two(top_k)),
        num_warps=8,
    )
    return output, top_weights, top_slots, natural


def _choose_splits(lists: int, num_slots: int, block_n: int, device: torch.device) -> int:
    count = _INTERPRETED_MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, 2 * count // lists)
    return min(wanted, triton.cdiv(num_slots, block_n), _MAX_SPLITS)
