"""Whole rows of a cache, by slot; plain torch."""

from functools import lru_cache

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
    return gather_rows_into(tensors, slots, (None,) * len(tensors))


def gather_rows_into(tensors: tuple[Tensor, ...], slots: Tensor, out: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """`gather_rows` into tensors that exist: `[B, S, M, D]` each, contiguous; None for a new one."""
    slots = slots.clamp(min=0)
    gathered, flat_index = [], {}
    for tensor, target in zip(tensors, out):
        flat = _flat_rows(tensor)
        if flat is None:
            found = _gather_by_head(tensor, slots)
            gathered.append(found if target is None else target.copy_(found))
            continue
        offsets = (tensor.stride(0) // tensor.shape[3], tensor.stride(1) // tensor.shape[3])
        if offsets not in flat_index:
            first = _first_rows(slots.shape[0], tensor.shape[1], slots.shape[1], *offsets, slots.device)
            flat_index[offsets] = (slots + first).flatten()
        index = flat_index[offsets]
        if target is None:
            gathered.append(flat.index_select(0, index).view(*slots.shape, tensor.shape[3]))
        else:
            torch.index_select(flat, 0, index, out=target.view(-1, tensor.shape[3]))
            gathered.append(target)
    return tuple(gathered)


def _flat_rows(tensor: Tensor) -> Tensor | None:
    """The storage as `[rows, D]` if every row of `tensor` is a row of it."""
    batch, heads, length, dim = tensor.shape
    stride_b, stride_h, stride_t, stride_d = tensor.stride()
    if stride_d != 1 or stride_t != dim or stride_b % dim or stride_h % dim:
        return None
    rows = ((batch - 1) * stride_b + (heads - 1) * stride_h) // dim + length
    return tensor.as_strided((rows, dim), (dim, 1))


@lru_cache(maxsize=64)
def _first_rows(
    batch: int, heads: int, selections: int, row_stride: int, head_stride: int, device: torch.device
) -> Tensor:
    """`[B, S, 1]` flat row of slot 0; the same until the storage changes its size."""
    per_row = torch.arange(batch, device=device)[:, None] * row_stride
    per_head = torch.arange(selections, device=device) // (selections // heads) * head_stride
    return (per_row + per_head)[:, :, None]


def _gather_by_head(tensor: Tensor, slots: Tensor) -> Tensor:
    batch, selections = slots.shape[:2]
    rows = torch.arange(batch, device=slots.device)[:, None, None]
    heads = torch.arange(selections, device=slots.device)[:, None] // (selections // tensor.shape[1])
    return tensor[rows, heads, slots]
