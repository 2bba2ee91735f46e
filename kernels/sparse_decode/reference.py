"""Sparse decoding in plain torch: what runs on a CPU, and what the Triton kernels are held against."""

import torch
from torch import Tensor

from kvstitch.kernels.common.ordering import largest
from kvstitch.kernels.common.rows import gather_rows


def sparse_decode_reference(
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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Arguments and results of `api.sparse_decode`."""
    batch, query_heads, _, dim = query.shape
    selections = slots.shape[1]
    rows = query.reshape(batch, selections, query_heads // selections, dim)
    chosen_keys, chosen_values = gather_rows((keys, values), slots)
    seen = (slots >= 0)[:, :, None]
    if not top_k and softcap is None and sink_logits is None and not return_logsumexp:
        attend = torch.nn.functional.scaled_dot_product_attention
        output = attend(rows, chosen_keys, chosen_values, attn_mask=seen, scale=scaling)
        # A selection of nothing gives nothing.
        output = output.masked_fill(~seen.any(dim=-1, keepdim=True), 0)
        return output.reshape(batch, query_heads, 1, -1), None, None, None
    weights, logsumexp = _softmax(rows, chosen_keys, seen, scaling, softcap, sink_logits)
    output = (weights @ chosen_values.to(weights.dtype)).to(query.dtype).reshape(batch, query_heads, 1, -1)
    logsumexp = logsumexp.reshape(batch, query_heads) if return_logsumexp else None
    if not top_k:
        return output, None, None, logsumexp
    mean = weights.mean(dim=2)
    mean[..., :first_candidate] = 0
    top_weights, top_slots = largest(mean.flatten(0, 1), slots.clamp(min=0).flatten(0, 1).long(), top_k)
    shape = (batch, selections, top_k)
    return output, top_weights.view(shape), top_slots.view(shape).int(), logsumexp


def _softmax(
    rows: Tensor, keys: Tensor, seen: Tensor, scaling: float, softcap: float | None, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights `[B, S, R, M]` in float32 (float64 for float64), zero where nothing is seen, and the log-sum-exp."""
    computed = torch.float64 if rows.dtype == torch.float64 else torch.float32
    logits = (rows.to(computed) @ keys.to(computed).transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    peak = logits.amax(dim=-1, keepdim=True)
    if sink_logits is not None:
        sinks = sink_logits.to(computed).view(1, rows.shape[1], -1, 1)
        peak = torch.maximum(peak, sinks)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weights = (logits - peak).exp()
    total = weights.sum(dim=-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sinks - peak).exp()
    return weights / total.clamp(min=torch.finfo(computed).tiny), peak + total.log()
