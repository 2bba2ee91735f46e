"""Attention of one query token over the slots that were chosen for it, and over what stands in for the rest."""

from functools import lru_cache

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.base import Reads, Rest
from kvstitch.kernels.common.rows import gather_rows
from kvstitch.kernels.sparse_decode.api import SparseDecode, sparse_decode


def attend(
    query: Float[Tensor, "B Q 1 D"],
    keys: Float[Tensor, "B H T D"],
    values: Float[Tensor, "B H T D2"],
    reads: Reads,
    scaling: float,
    top_k: int,
    num_sinks: int,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> SparseDecode:
    """As `sparse_decode`; `top_k` weights are those outside the first `num_sinks` columns of the slots.

    Raises:
        NotImplementedError: centroids that stand in for the rest, with weights asked for.
    """
    if reads.rest is None:
        plain = top_k == 0 and softcap is None and sink_logits is None
        if plain and reads.complete and query.device.type == "cpu":
            return SparseDecode(_unmasked(query, keys, values, reads.slots, scaling), None, None)
        return sparse_decode(query, keys, values, reads.slots, scaling, softcap, sink_logits, top_k, num_sinks)
    if top_k:
        raise NotImplementedError("replacement by centroids gives no weights; choose a growth that needs none")
    output = _with_rest(query, keys, values, reads.slots, reads.complete, reads.rest, scaling, softcap, sink_logits)
    return SparseDecode(output, None, None)


def _unmasked(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float) -> Tensor:
    """`sparse_decode` where every slot is one, which is known without a look: a third less time on a CPU."""
    batch, query_heads, _, dim = query.shape
    rows = query.view(batch, slots.shape[1], -1, dim)
    out = torch.nn.functional.scaled_dot_product_attention(rows, *_gathered(keys, values, slots), scale=scaling)
    return out.view(batch, query_heads, 1, values.shape[-1])


def _gathered(keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_rows` of slots none of which is -1."""
    batch, selections, count = slots.shape
    rows = None
    gathered = []
    for tensor in (keys, values):
        heads, length, dim = tensor.shape[1:]
        strides = (tensor.stride(0) // dim, tensor.stride(1) // dim)
        if rows is None or strides != rows[0]:
            rows = strides, (slots + _first_rows(batch, heads, selections, *strides, slots.device)).view(-1)
        flat = tensor.as_strided(((batch - 1) * strides[0] + (heads - 1) * strides[1] + length, dim), (dim, 1))
        gathered.append(flat.index_select(0, rows[1]).view(batch, selections, count, dim))
    return tuple(gathered)


@lru_cache(maxsize=64)
def _first_rows(batch: int, heads: int, selections: int, row_stride: int, head_stride: int, device: torch.device) -> Tensor:
    """`[B, S, 1]` row of slot 0 in the flat storage; the same at every step until the storage grows."""
    of_head = torch.arange(selections, device=device) // (selections // heads) * head_stride
    return (torch.arange(batch, device=device)[:, None] * row_stride + of_head)[..., None]


def attention_mass(
    query: Float[Tensor, "B Q 1 D"],
    keys: Float[Tensor, "B H T D"],
    bias: Float[Tensor, "B H T"] | None,
    slots: Int64[Tensor, "B S M"],
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Float[Tensor, "B Q"]:
    """Share of each query head's dense attention that falls on its slots; what a learned sink takes counts to neither."""
    batch, query_heads, _, dim = query.shape
    heads, selections = keys.shape[1], slots.shape[1]
    logits = query.float().view(batch, heads, -1, dim) @ keys.float().transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias[:, :, None]
    weights = logits.softmax(dim=-1).view(batch, selections, query_heads // selections, -1)
    read = weights.gather(-1, slots.clamp(min=0)[:, :, None].expand(-1, -1, weights.shape[2], -1))
    return read.masked_fill((slots < 0)[:, :, None], 0).sum(dim=-1).flatten(1)


def _with_rest(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    complete: bool,
    rest: Rest,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """One softmax over the chosen slots and, for each region, over as many copies of its mean key as are left."""
    batch, query_heads, _, dim = query.shape
    selections, count = slots.shape[1:]
    gather = _gathered if complete else lambda *chosen: gather_rows(chosen[:2], chosen[2])
    chosen_keys, chosen_values = (x.float().flatten(0, 1) for x in gather(keys, values, slots))
    rows = query.float().view(batch * selections, -1, dim)
    exact = torch.bmm(rows, chosen_keys.transpose(1, 2)).view(batch, selections, -1, count)
    logits = torch.cat((exact, rest.scores), dim=-1).mul_(scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if not complete:
        logits[..., :count].masked_fill_((slots < 0)[:, :, None], -torch.inf)
    logits[..., count:] += rest.log_counts[:, :, None]
    if sink_logits is not None:
        sinks = sink_logits.float().view(1, selections, -1, 1).expand(batch, -1, -1, -1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = logits.softmax(dim=-1).flatten(0, 1)
    standing_in = weights[..., count : count + rest.values.shape[2]]
    output = torch.bmm(standing_in, rest.values.flatten(0, 1)).baddbmm_(weights[..., :count], chosen_values)
    return output.to(query.dtype).view(batch, query_heads, 1, -1)
