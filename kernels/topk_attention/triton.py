"""Triton kernels of top-k attention. Logits are in units of log2 throughout.

`_topk_attention_fwd_kernel` is FlashAttention-2 with a running top-k beside the running softmax. It walks the keys
from the newest to the oldest: recent keys carry large weights, so the lists fill early, and a tile whose largest logit
cannot enter any list is passed over after one comparison a row. `_group_topk_fwd_kernel` is the second pass of the
exact group mean; `_merge_heads_kernel` merges the lists of a group's heads instead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.running_topk import (
    empty_list,
    insert_tile,
    key_indices,
    key_scores,
    may_enter,
)
from kvstitch.kernels.common.softcap import softcap_log2
from kvstitch.kernels.common.tiling import Tiling, dot_precision, next_power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _store_list(b_keys, b_weights, top_weights, top_indices, o_row, m_row, TOP_K: tl.constexpr, K: tl.constexpr):
    """b_keys [ROWS, K] sorted, b_weights [ROWS, K]; o_row int64: row of the contiguous outputs [rows, TOP_K]."""
    o_k = tl.arange(0, K)
    m_out = m_row[:, None] & (o_k < TOP_K)[None, :]
    o_out = o_row[:, None] * TOP_K + o_k[None, :]
    # A weight of zero is no edge.
    b_indices = tl.where(b_weights > 0, key_indices(b_keys), -1)
    tl.store(top_weights + o_out, b_weights, mask=m_out)
    tl.store(top_indices + o_out, b_indices, mask=m_out)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_sinks"])
def _topk_attention_fwd_kernel(
    query,
    key,
    value,
    output,
    logsumexp,
    top_weights,
    top_indices,
    first_key,
    sink_logits,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    num_query_heads,
    num_queries,
    num_keys,
    num_sinks,
    scaling_log2,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    K: tl.constexpr,
):
    # The last blocks see most keys and start first.
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_query_heads
    i_h = i_bh % num_query_heads
    lowest = 0
    if HAS_PADDING:
        lowest = tl.load(first_key + i_b).to(tl.int32)
    first_row = num_keys - num_queries + i_m * BLOCK_M

    o_d = tl.arange(0, BLOCK_D)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_position = num_keys - num_queries + o_m
    m_m = o_m < num_queries
    m_d = o_d < HEAD_DIM
    p_q = query + i_b * stride_qb + i_h * stride_qh + o_m.to(tl.int64)[:, None] * stride_qn + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
    o_tile = tl.arange(0, BLOCK_N)
    p_k = key + i_b * stride_kb + (i_h // GROUP) * stride_kh + o_tile[None, :] * stride_kn + o_d[:, None]
    if HAS_VALUE:
        p_v = value + i_b * stride_vb + (i_h // GROUP) * stride_vh + o_tile[:, None] * stride_vn + o_d[None, :]

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    b_keys = empty_list(BLOCK_M, K)
    first_tile = lowest // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(tl.minimum(num_keys, first_row + BLOCK_M) - first_tile, BLOCK_N)
    for i_n in range(num_tiles):
        start = first_tile + (num_tiles - 1 - i_n) * BLOCK_N
        o_n = start + o_tile
        m_n = o_n < num_keys
        b_k = tl.load(p_k + start.to(tl.int64) * stride_kn, mask=m_n[None, :] & m_d[:, None], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scaling_log2
        if HAS_SOFTCAP:
            b_s = softcap_log2(b_s, softcap)
        if (start + BLOCK_N > first_row + 1) | (start < lowest):
            b_s = tl.where((o_n[None, :] <= o_position[:, None]) & (o_n >= lowest)[None, :], b_s, float("-inf"))
        b_tile_max = tl.max(b_s, 1)
        if TOP_K > 0:
            if may_enter(b_keys, b_tile_max):
                b_eligible = tl.where((o_n >= lowest + num_sinks)[None, :] & m_m[:, None], b_s, float("-inf"))
                b_keys = insert_tile(b_keys, b_eligible, o_n[None, :])

        b_new_max = tl.maximum(b_max, b_tile_max)
        # A row that has seen nothing keeps -inf, and -inf - -inf must not reach exp2.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_scale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_scale + tl.sum(b_p, 1)
        if HAS_VALUE:
            # Weight 0 times whatever padding holds, perhaps NaN, must not reach the sum.
            m_v = m_n & (o_n >= lowest)
            b_v = tl.load(p_v + start.to(tl.int64) * stride_vn, mask=m_v[:, None] & m_d[None, :], other=0.0)
            b_output = b_output * b_scale[:, None]
            b_output = tl.dot(b_p.to(b_v.dtype), b_v, b_output, input_precision=PRECISION)
        b_max = b_new_max

    if HAS_SINK_LOGITS:
        b_sink = tl.load(sink_logits + i_h).to(tl.float32) * LOG2_E
        # Rows without keys keep -inf, so that they stay recognisable.
        b_shift = tl.where(b_max == float("-inf"), float("-inf"), tl.maximum(b_max, b_sink))
        b_safe = tl.where(b_max == float("-inf"), 0.0, b_shift)
        b_scale = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_scale + tl.exp2(b_sink - b_safe)
        b_output = b_output * b_scale[:, None]
        b_max = b_shift
    m_seen = b_max > float("-inf")
    b_sum = tl.where(m_seen, b_sum, 1.0)
    b_logsumexp = tl.where(m_seen, b_max + tl.log2(b_sum), 0.0)

    o_row = i_bh * num_queries + o_m
    tl.store(logsumexp + o_row, b_logsumexp / LOG2_E, mask=m_m)
    if HAS_VALUE:
        b_output = b_output / b_sum[:, None]
        p_o = output + o_row[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(p_o, b_output.to(output.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])
    if TOP_K > 0:
        b_keys = tl.sort(b_keys, descending=True)
        b_weights = tl.exp2(key_scores(b_keys) - b_logsumexp[:, None])
        _store_list(b_keys, b_weights, top_weights, top_indices, o_row, m_m, TOP_K, K)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_sinks"])
def _group_topk_fwd_kernel(
    query,
    key,
    logsumexp,
    top_weights,
    top_indices,
    first_key,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    num_heads,
    num_queries,
    num_keys,
    num_sinks,
    scaling_log2,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    K: tl.constexpr,
):
    # The group folds into rows: row r is head r % GROUP_ROWS of query r // GROUP_ROWS.
    QUERIES: tl.constexpr = BLOCK_M // GROUP_ROWS
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_heads
    i_h = i_bh % num_heads
    lowest = 0
    if HAS_PADDING:
        lowest = tl.load(first_key + i_b).to(tl.int32)
    first_query = num_keys - num_queries + i_m * QUERIES

    o_d = tl.arange(0, BLOCK_D)
    o_r = tl.arange(0, BLOCK_M)
    o_g = i_h * GROUP + o_r % GROUP_ROWS
    o_m = i_m * QUERIES + o_r // GROUP_ROWS
    m_r = (o_m < num_queries) & (o_r % GROUP_ROWS < GROUP)
    m_d = o_d < HEAD_DIM
    p_q = query + i_b * stride_qb + o_g[:, None] * stride_qh + o_m.to(tl.int64)[:, None] * stride_qn + o_d[None, :]
    b_q = tl.load(p_q, mask=m_r[:, None] & m_d[None, :], other=0.0)
    o_tile = tl.arange(0, BLOCK_N)
    p_k = key + i_b * stride_kb + i_h * stride_kh + o_tile[None, :] * stride_kn + o_d[:, None]
    p_l = logsumexp + (i_b * num_heads * GROUP + o_g) * num_queries + o_m
    # Rows that stand for no head weigh nothing.
    b_logsumexp = tl.load(p_l, mask=m_r, other=float("inf")) * LOG2_E

    b_keys = empty_list(QUERIES, K)
    first_tile = lowest // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(tl.minimum(num_keys, first_query + QUERIES) - first_tile, BLOCK_N)
    for i_n in range(num_tiles):
        start = first_tile + (num_tiles - 1 - i_n) * BLOCK_N
        o_n = start + o_tile
        m_k = (o_n < num_keys)[None, :] & m_d[:, None]
        b_k = tl.load(p_k + start.to(tl.int64) * stride_kn, mask=m_k, other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scaling_log2
        if HAS_SOFTCAP:
            b_s = softcap_log2(b_s, softcap)
        if (start + BLOCK_N > first_query + 1) | (start < lowest + num_sinks):
            m_s = (o_n[None, :] <= (num_keys - num_queries + o_m)[:, None]) & (o_n >= lowest + num_sinks)[None, :]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_p = tl.reshape(tl.exp2(b_s - b_logsumexp[:, None]), (QUERIES, GROUP_ROWS, BLOCK_N))
        b_mean = tl.sum(b_p, 1) * (1.0 / GROUP)
        b_score = tl.where(b_mean > 0, b_mean, float("-inf"))
        if may_enter(b_keys, tl.max(b_score, 1)):
            b_keys = insert_tile(b_keys, b_score, o_n[None, :])

    b_keys = tl.sort(b_keys, descending=True)
    o_query = i_m * QUERIES + tl.arange(0, QUERIES)
    b_weights = tl.maximum(key_scores(b_keys), 0.0)
    o_row = i_bh * num_queries + o_query
    _store_list(b_keys, b_weights, top_weights, top_indices, o_row, o_query < num_queries, TOP_K, K)


@triton.jit(do_not_specialize=["num_queries"])
def _merge_heads_kernel(
    head_weights,
    head_indices,
    top_weights,
    top_indices,
    num_queries,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    K: tl.constexpr,
):
    i_bh = tl.program_id(1).to(tl.int64)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < num_queries
    o_c = tl.arange(0, BLOCK_C)
    p_list = ((i_bh * GROUP + o_c // TOP_K)[None, :] * num_queries + o_m[:, None]) * TOP_K + (o_c % TOP_K)[None, :]
    b_listed = tl.load(head_indices + p_list, mask=m_m[:, None] & (o_c < GROUP * TOP_K)[None, :], other=-1)

    b_total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    b_repeated = tl.zeros((BLOCK_M, BLOCK_C), tl.int32)
    for i_c in range(GROUP * TOP_K):
        p_entry = ((i_bh * GROUP + i_c // TOP_K) * num_queries + o_m) * TOP_K + i_c % TOP_K
        b_index = tl.load(head_indices + p_entry, mask=m_m, other=-1)
        b_weight = tl.load(head_weights + p_entry, mask=m_m, other=0.0)
        b_same = b_listed == b_index[:, None]
        b_total += tl.where(b_same, b_weight[:, None], 0.0)
        # Each key counts where it is listed first.
        b_repeated = tl.where(b_same & (o_c > i_c)[None, :], 1, b_repeated)
    b_mean = b_total * (1.0 / GROUP)
    b_score = tl.where((b_listed >= 0) & (b_repeated == 0) & (b_mean > 0), b_mean, float("-inf"))
    b_keys = tl.sort(insert_tile(empty_list(BLOCK_M, K), b_score, b_listed), descending=True)
    b_weights = tl.maximum(key_scores(b_keys), 0.0)
    _store_list(b_keys, b_weights, top_weights, top_indices, i_bh * num_queries + o_m, m_m, TOP_K, K)


def topk_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scaling: float,
    top_k: int,
    num_sinks: int,
    aggregation: str,
    group_mean: str,
    first_key: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    logsumexp: Tensor | None,
    tiling: Tiling | None = None,
    group_tiling: Tiling | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Arguments and results of `api.topk_attention`; without `value` no output is computed.

    Args:
        tiling, group_tiling: of the forward and of the second pass; the first of `forward_tilings` and `group_tilings`
            if None.
    """
    batch, query_heads, num_queries, head_dim = query.shape
    heads = key.shape[1]
    group = query_heads // heads
    if value is not None and value.shape[-1] != head_dim:
        raise ValueError(f"the Triton kernel needs value and key of one head dim, got {value.shape[-1]} and {head_dim}")
    query, key, value = _inner_contiguous(query), _inner_contiguous(key), _inner_contiguous(value)
    exact = aggregation == "query_group" and group_mean == "exact" and group > 1
    output = None if value is None else query.new_empty(query.shape)
    lists = None if exact else _new_lists(query, query_heads, top_k)
    options = (scaling, num_sinks, first_key, softcap)
    if not (exact and value is None and logsumexp is not None):
        found = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        _launch_forward(query, key, value, output, found, lists, *options, sink_logits, tiling)
        logsumexp = found if logsumexp is None else logsumexp
    if exact:
        lists = _new_lists(query, heads, top_k)
        _launch_group(query, key, logsumexp.float().contiguous(), lists, *options, group_tiling)
    elif aggregation == "query_group" and group > 1:
        merged = _new_lists(query, heads, top_k)
        _launch_merge(lists, merged, group)
        lists = merged
    return output, *lists


def forward_tilings(head_dim: int, top_k: int, element_bytes: int) -> list[Tiling]:
    """Tilings without spills on sm_80 and sm_90, best guess first (`top_k` 0: no lists). No GPU has timed them."""
    if element_bytes == 4:
        # From a head dim of 80 on the queries fill the registers, up to 128 because TF32 splits them in two.
        if 64 < head_dim <= 128 and top_k > 8:
            return [Tiling(16, 32, 4, 2)]
        return [Tiling(32, 32 if head_dim <= 64 else 16, 8, 2 if head_dim <= 128 else 1)]
    if head_dim > 128:
        return [Tiling(64, 32, 8, 3), Tiling(64, 32, 8, 2)]
    if head_dim > 64 and top_k > 0:
        return [Tiling(128, 32, 8, 3), Tiling(64, 64, 8, 3)]
    return [Tiling(128, 64, 8, 3), Tiling(64, 64, 8, 3)]


def group_tilings(head_dim: int, top_k: int, element_bytes: int) -> list[Tiling]:
    """As `forward_tilings`, for the second pass."""
    if element_bytes == 4:
        # Eight warps spill with 16 edges of head dim 64 on sm_80.
        return [Tiling(64, 16, 4 if head_dim <= 64 and top_k > 8 else 8, 2)]
    return [Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 3)]


def _launch_forward(query, key, value, output, logsumexp, lists, scaling, num_sinks, first_key, softcap, sinks, tiling):
    batch, query_heads, num_queries, head_dim = query.shape
    top_k = 0 if lists is None else lists[0].shape[-1]
    tiling = tiling or forward_tilings(head_dim, top_k, query.element_size())[0]
    strided_value = key if value is None else value
    _topk_attention_fwd_kernel[(triton.cdiv(num_queries, tiling.block_m), batch * query_heads)](
        query,
        key,
        value,
        output,
        logsumexp,
        *(lists or (None, None)),
        first_key,
        sinks,
        *query.stride()[:3],
        *key.stride()[:3],
        *strided_value.stride()[:3],
        query_heads,
        num_queries,
        key.shape[2],
        num_sinks,
        scaling * LOG2_E.value,
        0.0 if softcap is None else softcap * LOG2_E.value,
        GROUP=query_heads // key.shape[1],
        HEAD_DIM=head_dim,
        TOP_K=top_k,
        HAS_VALUE=value is not None,
        HAS_PADDING=first_key is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINK_LOGITS=sinks is not None,
        PRECISION=dot_precision(query),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        K=max(2, next_power_of_two(top_k)),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _launch_group(query, key, logsumexp, lists, scaling, num_sinks, first_key, softcap, tiling):
    batch, query_heads, num_queries, head_dim = query.shape
    heads, num_keys = key.shape[1:3]
    top_k = lists[0].shape[-1]
    tiling = tiling or group_tilings(head_dim, top_k, query.element_size())[0]
    group_rows = next_power_of_two(query_heads // heads)
    # At least one query a tile, with all of its heads.
    block_m = max(tiling.block_m, group_rows)
    _group_topk_fwd_kernel[(triton.cdiv(num_queries * group_rows, block_m), batch * heads)](
        query,
        key,
        logsumexp,
        *lists,
        first_key,
        *query.stride()[:3],
        *key.stride()[:3],
        heads,
        num_queries,
        num_keys,
        num_sinks,
        scaling * LOG2_E.value,
        0.0 if softcap is None else softcap * LOG2_E.value,
        GROUP=query_heads // heads,
        HEAD_DIM=head_dim,
        TOP_K=top_k,
        HAS_PADDING=first_key is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query),
        GROUP_ROWS=group_rows,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        K=max(2, next_power_of_two(top_k)),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _launch_merge(head_lists, lists, group):
    batch, heads, num_queries, top_k = lists[0].shape
    block_c = next_power_of_two(group * top_k)
    block_m = max(1, min(64, 4096 // block_c))
    _merge_heads_kernel[(triton.cdiv(num_queries, block_m), batch * heads)](
        *head_lists,
        *lists,
        num_queries,
        GROUP=group,
        TOP_K=top_k,
        BLOCK_M=block_m,
        BLOCK_C=block_c,
        K=max(2, next_power_of_two(top_k)),
        num_warps=4,
        num_stages=2,
    )


def _new_lists(query: Tensor, graph_heads: int, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], graph_heads, query.shape[2], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=query.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=query.device)


def _inner_contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()
