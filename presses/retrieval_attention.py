"""Attention of one query token over the slots that were chosen for it, and over what stands in for the rest."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.base import Reads
from kvstitch.allocators.retrieval.rows import gather_known_rows
from kvstitch.kernels.common.ordering import largest
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

    Where centroids stand in for the rest, they take their share of the weights.
    """
    if reads.rest is None:
        plain = top_k == 0 and softcap is None and sink_logits is None
        if plain and reads.complete and query.device.type == "cpu":
            return SparseDecode(_unmasked(query, keys, values, reads.slots, scaling), None, None)
        return sparse_decode(query, keys, values, reads.slots, scaling, softcap, sink_logits, top_k, num_sinks)
    if query.is_cuda and not top_k:
        return SparseDecode(joined_with_rest(query, keys, values, reads, scaling, softcap, sink_logits), None, None)
    output, weights = _with_rest(query, keys, values, reads, scaling, softcap, sink_logits)
    if not top_k:
        return SparseDecode(output, None, None)
    mean = weights.mean(dim=2)
    mean[..., :num_sinks] = 0
    # Padded where there are fewer slots, as `sparse_decode` does.
    top, slots = largest(mean.flatten(0, 1), reads.slots.clamp(min=0).flatten(0, 1), top_k)
    shape = (*mean.shape[:2], top_k)
    return SparseDecode(output, top.view(shape), slots.view(shape).int())


def _unmasked(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float) -> Tensor:
    """`sparse_decode` where every slot is one, which is known without a look: a third less time on a CPU."""
    batch, query_heads, _, dim = query.shape
    rows = query.view(batch, slots.shape[1], -1, dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        rows, *gather_known_rows((keys, values), slots), scale=scaling
    )
    return out.view(batch, query_heads, 1, values.shape[-1])


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


def joined_with_rest(
    query: Float[Tensor, "B Q 1 D"],
    keys: Float[Tensor, "B H T D"],
    values: Float[Tensor, "B H T D2"],
    reads: Reads,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Float[Tensor, "B Q 1 D2"]:
    """The chosen slots by `sparse_decode`, what stands in for the rest beside it, joined by their log-sum-exps.

    One kernel reads keys and values where they lie, so on a GPU nothing is gathered; on a CPU one softmax over both is
    faster.
    """
    slots, rest = reads.slots, reads.rest
    batch, selections = slots.shape[:2]
    near = sparse_decode(query, keys, values, slots, scaling, softcap, sink_logits, return_logsumexp=True)
    logits = rest.scores * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + rest.log_counts[:, :, None]
    near_logits = near.logsumexp.view(batch, selections, -1, 1)
    share = torch.cat((near_logits, logits.to(near_logits.dtype)), dim=-1).softmax(dim=-1)
    output = share[..., :1] * near.output.view(batch, selections, share.shape[2], -1)
    output = output + share[..., 1:] @ rest.values.to(share.dtype)
    return output.to(query.dtype).view(batch, query.shape[1], 1, -1)


def _with_rest(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reads: Reads,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One softmax over the chosen slots and, for each region that stands in, over as many copies of its mean key as are
    left of it; the output, and the weights of the slots `[B, S, N, M]`."""
    batch, query_heads, _, dim = query.shape
    slots, rest = reads.slots, reads.rest
    selections, count = slots.shape[1:]
    gather = gather_known_rows if reads.complete else gather_rows
    chosen_keys, chosen_values = (x.float().flatten(0, 1) for x in gather((keys, values), slots))
    rows = query.float().view(batch * selections, -1, dim)
    exact = torch.bmm(rows, chosen_keys.transpose(1, 2)).view(batch, selections, -1, count)
    logits = torch.cat((exact, rest.scores), dim=-1).mul_(scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if not reads.complete:
        logits[..., :count].masked_fill_((slots < 0)[:, :, None], -torch.inf)
    logits[..., count:] += rest.log_counts[:, :, None]
    if sink_logits is not None:
        sinks = sink_logits.float().view(1, selections, -1, 1).expand(batch, -1, -1, -1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = logits.softmax(dim=-1)
    flat = weights.flatten(0, 1)
    output = torch.bmm(flat[..., count : count + rest.values.shape[2]], rest.values.flatten(0, 1).float())
    output.baddbmm_(flat[..., :count], chosen_values)
    return output.to(query.dtype).view(batch, query_heads, 1, -1), weights[..., :count]
