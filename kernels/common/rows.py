"""Whole rows of a cache, by slot; plain torch."""

import torch
from torch import Tensor


def gather_rows(tensors: tuple[Tensor, ...], slots: Tensor) -> tuple[Tensor, ...]:
    """`tensor[b, h, slots[b, s]]` for each tensor, kv head h = s // (S // H).

    Rows are copied whole out of one flat view of the storage: four times as fast as indexing with three index tensors,
    five times as fast as `gather` through an expanded index.

    Args:
        tensors: `[B, H, T, D]` each, views of larger storage allowed.
        slots: `[B, S, M]` with S a multiple of H; -1 reads slot 0.

    Returns: `[B, S, M, D]` each, contiguous.
    """
    slots = slots.clamp(min=0)
    gathered, flat_index = [], {}
    for tensor in tensors:
        flat = _flat_rows(tensor)
        if flat is None:
            gathered.append(_gather_by_head(tensor, slots))
            continue
        offsets = (tensor.stride(0) // tensor.shape[3], tensor.stride(1) // tensor.shape[3])
        if offsets not in flat_index:
            flat_index[offsets] = (slots + _first_rows(offsets, tensor.shape[1], slots)).flatten()
        rows = flat.index_select(0, flat_index[offsets])
        gathered.append(rows.view(*slots.shape, tensor.shape[3]))
    return tuple(gathered)


def _flat_rows(tensor: Tensor) -> Tensor | None:
    """The storage as `[rows, D]` if every row of `tensor` is a row of it."""
    batch, heads, length, dim = tensor.shape
    stride_b, stride_h, stride_t, stride_d = tensor.stride()
    if stride_d != 1 or stride_t != dim or stride_b % dim or stride_h % dim:
        return None
    rows = ((batch - 1) * stride_b + (heads - 1) * stride_h) // dim + length
    return tensor.as_strided((rows, dim), (dim, 1))


def _first_rows(offsets: tuple[int, int], heads: int, slots: Tensor) -> Tensor:
    """`[B, S, 1]` flat row of slot 0."""
    batch, selections = slots.shape[:2]
    per_row = torch.arange(batch, device=slots.device)[:, None] * offsets[0]
    per_head = torch.arange(selections, device=slots.device) // (selections // heads) * offsets[1]
    return (per_row + per_head)[:, :, None]


def _gather_by_head(tensor: Tensor, slots: Tensor) -> Tensor:
    batch, selections = slots.shape[:2]
    rows = torch.arange(batch, device=slots.device)[:, None, None]
    heads = torch.arange(selections, device=slots.device)[:, None] // (selections // tensor.shape[1])
    return tensor[rows, heads, slots]
