"""Triton kernel of the incremental community step, and its launcher."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.tiling import next_power_of_two


# The lengths, and the strides of labels that have room for them, change as the sequence grows and must not compile the
# kernel anew.
@triton.jit(do_not_specialize=["num_slots", "capacity", "stride_lb", "stride_lh"])
def _community_update_kernel(
    labels,
    centroids,
    sizes,
    degrees,
    total_degree,
    count,
    key,
    slot,
    edge_slots,
    edge_weights,
    chosen,
    stride_lb,
    stride_lh,
    stride_kb,
    stride_kh,
    num_heads,
    capacity,
    num_slots,
    resolution,
    direct_share,
    EDGES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // num_heads
    i_h = i_bh % num_heads
    token = tl.load(slot + i_b).to(tl.int64)
    if token < 0:
        tl.store(chosen + i_bh, -1)
    else:
        o_e = tl.arange(0, BLOCK_E)
        o_d = tl.arange(0, BLOCK_D)
        m_e = o_e < EDGES
        m_d = o_d < HEAD_DIM
        b_slot = tl.load(edge_slots + i_bh * EDGES + o_e, mask=m_e, other=-1).to(tl.int64)
        b_weight = tl.load(edge_weights + i_bh * EDGES + o_e, mask=m_e, other=0.0).to(tl.float32)
        # What is not finite is no edge; it is the only value that does not vanish when taken from itself.
        b_weight = tl.where(b_weight - b_weight == 0, b_weight, 0.0)
        p_labels = labels + i_b * stride_lb + i_h * stride_lh
        is_own = (b_slot == token) & m_e
        m_read = (b_slot >= 0) & (b_slot < num_slots)
        b_label = tl.load(p_labels + b_slot, mask=m_read, other=-1)
        m_neighbour = b_label >= 0
        own = tl.sum(tl.where(is_own, b_weight, 0.0), 0)
        b_attention = tl.where(m_neighbour, b_weight, 0.0)

        b_to_token = b_attention * (0.5 * direct_share + (1 - direct_share) * own)
        token_degree = tl.sum(b_to_token, 0)
        b_grown = b_to_token + (1 - direct_share) * b_attention * (tl.sum(b_attention, 0) - b_attention)
        new_total = tl.load(total_degree + i_bh) + tl.sum(b_grown, 0) + token_degree

        m_same = (b_label[:, None] == b_label[None, :]) & m_neighbour[:, None] & m_neighbour[None, :]
        b_link = tl.sum(tl.where(m_same, b_to_token[None, :], 0.0), 1)
        b_added = tl.sum(tl.where(m_same, b_grown[None, :], 0.0), 1)
        p_degrees = degrees + i_bh * capacity
        b_degree = tl.load(p_degrees + b_label, mask=m_neighbour, other=0.0) + b_added
        b_gain = b_link - resolution * (token_degree / tl.maximum(new_total, 1.1754943508222875e-38)) * b_degree
        b_gain = tl.where(m_neighbour, b_gain, float("-inf"))

        best = tl.max(b_gain, 0)
        best_label = tl.min(tl.where(m_neighbour & ((b_gain < best) == 0), b_label, 0x7FFFFFFF), 0)
        num_communities = tl.load(count + i_bh)
        full = num_communities >= capacity
        joins = (best > 0) | (full & (tl.max(m_neighbour.to(tl.int32), 0) > 0))
        label = tl.where(joins, best_label, tl.minimum(num_communities, capacity - 1))
        opens = (joins == 0) & (full == 0)

        o_member = i_bh * capacity + label
        size = tl.load(sizes + o_member) + 1
        degree = tl.load(p_degrees + label) + token_degree
        degree += tl.sum(tl.where(m_neighbour & (b_label == label), b_grown, 0.0), 0)
        b_mean = tl.load(centroids + o_member * HEAD_DIM + o_d, mask=m_d, other=0.0)
        b_key = tl.load(key + i_b * stride_kb + i_h * stride_kh + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_mean += (b_key - b_mean) / size
        # The first edge into each community writes its degree; the chosen one is written below.
        b_earlier = tl.sum((m_same & (o_e[None, :] < o_e[:, None])).to(tl.int32), 1)
        m_writes = m_neighbour & (b_earlier == 0) & (b_label != label)

        # Every thread has read before any thread writes.
        tl.debug_barrier()
        tl.store(p_degrees + b_label, b_degree, mask=m_writes)
        tl.store(p_degrees + label, degree)
        tl.store(sizes + o_member, size)
        tl.store(centroids + o_member * HEAD_DIM + o_d, b_mean, mask=m_d)
        tl.store(total_degree + i_bh, new_total)
        tl.store(count + i_bh, num_communities + opens.to(tl.int32))
        tl.store(p_labels + token, label)
        tl.store(chosen + i_bh, label)


def community_update_triton(
    communities,
    key: Tensor,
    slot: Tensor,
    edge_slots: Tensor,
    edge_weights: Tensor,
    resolution: float,
    direct_share: float,
) -> Tensor:
    """Arguments and result of `api.community_update`; one launch, one warp per row and head."""
    state = (communities.centroids, communities.sizes, communities.degrees, communities.total_degree, communities.count)
    if not all(tensor.is_contiguous() for tensor in state) or communities.labels.stride(2) != 1:
        raise ValueError("the Triton kernel needs contiguous centroids, sizes, degrees, total_degree and count")
    batch, heads, num_edges = edge_slots.shape
    key = key if key.stride(2) == 1 else key.contiguous()
    chosen = torch.empty(batch, heads, dtype=torch.int32, device=key.device)
    _community_update_kernel[(batch * heads,)](
        communities.labels,
        *state,
        key,
        slot.contiguous(),
        edge_slots.contiguous(),
        edge_weights.contiguous(),
        chosen,
        *communities.labels.stride()[:2],
        *key.stride()[:2],
        heads,
        communities.sizes.shape[2],
        communities.labels.shape[2],
        float(resolution),
        float(direct_share),
        EDGES=num_edges,
        HEAD_DIM=key.shape[2],
        BLOCK_E=max(2, next_power_of_two(num_edges)),
        BLOCK_D=next_power_of_two(key.shape[2]),
        num_warps=1,
    )
    return chosen
