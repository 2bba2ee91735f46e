"""Whole rows of a cache, by slots that are known to be there."""

from functools import lru_cache

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def gather_known_rows(
    tensors: tuple[Float[Tensor, "B H T D"], ...], slots: Int64[Tensor, "B S M"]
) -> tuple[Tensor, ...]:
    """`kvstitch.kernels.common.rows.gather_rows` where no slot is -1, for steps of which every microsecond counts.

    Nothing is clamped, and the first row of each head is worked out once for each storage.

    Args:
        tensors: rows of D contiguous; views of longer storage allowed.
        slots: S is H, or a multiple of it whose selections share a head in order.

    Returns: `[B, S, M, D]` each.
    """
    batch, selections, count = slots.shape
    index, known, gathered = None, None, []
    for tensor in tensors:
        heads, length, dim = tensor.shape[1:]
        row_stride, head_stride = tensor.stride(0) // dim, tensor.stride(1) // dim
        if known != (row_stride, head_stride):
            known = row_stride, head_stride
            index = (slots + _first_rows(batch, heads, selections, row_stride, head_stride, slots.device)).view(-1)
        num_rows = (batch - 1) * row_stride + (heads - 1) * head_stride + length
        flat = tensor.as_strided((num_rows, dim), (dim, 1))
        gathered.append(flat.index_select(0, index).view(batch, selections, count, dim))
    return tuple(gathered)


@lru_cache(maxsize=64)
def _first_rows(
    batch: int, heads: int, selections: int, row_stride: int, head_stride: int, device: torch.device
) -> Tensor:
    """`[B, S, 1]` row of slot 0 in the flat storage; the same at every step until the storage grows."""
    of_head = torch.arange(selections, device=device) // (selections // heads) * head_stride
    return (torch.arange(batch, device=device)[:, None] * row_stride + of_head)[..., None]
