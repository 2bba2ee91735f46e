"""Attention over a `StitchLayer`: the grouped heads of a decode step folded into rows, and chunks over compacted slots."""

import math

import torch
from torch import Tensor

# Scratch grows by whole blocks of so many slots, so that steps seldom find it too small.
_SCRATCH_SLOTS = 1024


class Scratch:
    """Room for the logits of a decode step where no fused attention makes them, kept from step to step and layer to layer."""

    def __init__(self):
        self._flat: dict[torch.dtype, Tensor] = {}

    def take(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor `[B * H, G, T]` of unknown content; what was taken before of this dtype is overwritten."""
        rows, slots = math.prod(shape[:-1]), shape[-1]
        flat = self._flat.get(dtype)
        if flat is None or flat.device != device or len(flat) < rows * slots:
            flat = torch.empty(rows * -(-slots // _SCRATCH_SLOTS) * _SCRATCH_SLOTS, dtype=dtype, device=device)
            self._flat[dtype] = flat
        return flat[: rows * slots].view(shape)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """One query token over all stored slots; the G query heads of a kv head become G rows, keys are never repeated.

    Args:
        query: `[B, H * G, 1, D]`.
        keys: `[B, H, T, D]`, values alike.
        bias: `[B, H, T]` added to the logits (empty slots), or None.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sink_logits: `[H * G]` learned logit that takes mass and has no value (GPT-OSS).
        scratch: room for logits that is used again at the next step; None makes it for this one.

    Returns: `[B, H * G, 1, D]`.
    """
    batch, query_heads, _, dim = query.shape
    heads = keys.shape[1]
    rows = query.reshape(batch, heads, query_heads // heads, dim)
    mask = None if bias is None else bias[:, :, None]
    if softcap is None and sink_logits is None and not _matmul_is_faster(query):
        out = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, mask, scale=scaling)
    else:
        sinks = None if sink_logits is None else sink_logits.view(1, heads, -1, 1).expand(batch, -1, -1, 1)
        out = _softmax_in_place(rows, keys, values, mask, scaling, softcap, sinks, scratch or Scratch())
    return out.reshape(batch, query_heads, 1, values.shape[-1])


def chunk_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """N new tokens, whose keys are the last N slots, over all stored slots: causal in slot order.

    Shapes as in `decode_attention` with `query` `[B, H * G, N, D]`.
    """
    batch, query_heads, count, dim = query.shape
    heads, length = keys.shape[1:3]
    groups = query_heads // heads
    mask = _causal_bias(count, length, query)
    if bias is not None:
        mask = (mask + bias[:, :, None]).clamp(min=torch.finfo(query.dtype).min).flatten(0, 1)[:, None]
    rows = query.reshape(batch * heads, groups, count, dim)
    # Expanded, not repeated: the G heads read one copy of the keys through a stride of 0.
    keys = keys.flatten(0, 1)[:, None].expand(-1, groups, -1, -1)
    values = values.flatten(0, 1)[:, None].expand(-1, groups, -1, -1)
    if softcap is None and sink_logits is None:
        out = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, mask, scale=scaling)
    else:
        sinks = None
        if sink_logits is not None:
            sinks = sink_logits.view(1, heads, groups, 1, 1).expand(batch, -1, -1, count, 1).flatten(0, 1)
        out = _explicit_softmax(rows, keys, values, mask, scaling, softcap, sinks)
    return out.reshape(batch, query_heads, count, values.shape[-1])


def _matmul_is_faster(query: Tensor) -> bool:
    # Measured on CPUs at 32k slots: folded sdpa takes 3.4 ms in bfloat16, matmul-softmax-matmul 1.8 ms; in float32 it is
    # the other way round (3.2 against 4.2).
    return query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)


def _causal_bias(count: int, length: int, like: Tensor) -> Tensor:
    """`[N, T]`: the lowest finite value where the slot came after the query; query i is slot T - N + i."""
    slot = torch.arange(length, device=like.device)
    newest = torch.arange(length - count, length, device=like.device)
    return (slot > newest[:, None]).to(like.dtype) * torch.finfo(like.dtype).min


def _explicit_softmax(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    logits = (query @ keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits + mask
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()), dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


def _softmax_in_place(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    scratch: Scratch,
) -> Tensor:
    """As `_explicit_softmax`, without a new tensor as long as the cache: rows `[B, H, G, D]`, output `[B * H, G, D]`."""
    batch, heads, groups, _ = rows.shape
    shape = batch * heads, groups, keys.shape[2]
    products = scratch.take(shape, rows.dtype, rows.device)
    torch.bmm(rows.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out=products)
    logits = products
    if rows.dtype != torch.float32:
        logits = scratch.take(shape, torch.float32, rows.device).copy_(products)
    logits.mul_(scaling)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        logits.view(batch, heads, groups, -1).add_(mask)
    most = logits.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.float().flatten(0, 1)
        most = torch.maximum(most, sinks)
    total = logits.sub_(most).exp_().sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - most).exp()
    logits.div_(total)
    weights = logits if logits is products else products.copy_(logits)
    return torch.bmm(weights, values.flatten(0, 1))
