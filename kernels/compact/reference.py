"""Compaction in plain torch: what runs on a CPU, and what the Triton kernel is held against."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvstitch.kernels.common.rows import gather_rows, gather_rows_into

# Rows on their way through a temporary stay in cache: measured, one head of 1 MB at a time moves as fast as memcpy, all
# heads at once at half of that.
_BLOCK_BYTES = 2**20


@torch.no_grad()
def compact_reference(
    tensors: Sequence[Tensor], slots: Tensor, fills: list[float | int | None], out: Sequence[Tensor] | None
) -> None:
    """Arguments of `api.compact`."""
    if out is not None:
        return _into(tensors, slots, fills, out)
    kept = slots.shape[2]
    empty = (slots < 0)[..., None]
    for tensor, fill in zip(tensors, fills):
        rows = tensor.view(*tensor.shape[:3], -1)
        # Each block of heads is read whole before it is written.
        for block in _blocks(rows, kept):
            (moved,) = gather_rows((rows[block],), slots[block])
            held = rows[block][:, :, :kept]
            if fill is None:
                moved = moved.where(~empty[block], held)
            else:
                moved.masked_fill_(empty[block], fill)
            held.copy_(moved)


def _into(tensors: Sequence[Tensor], slots: Tensor, fills: list[float | int | None], out: Sequence[Tensor]) -> None:
    gather_rows_into(
        tuple(tensor.view(*tensor.shape[:3], -1) for tensor in tensors),
        slots,
        tuple(target.view(*target.shape[:3], -1) for target in out),
    )
    empty = slots < 0
    # A look is cheap on a CPU, and mostly no slot is empty.
    if bool(empty.any()):
        for target, fill in zip(out, fills):
            target[empty] = fill


def _blocks(rows: Tensor, kept: int) -> Iterator[tuple[slice, slice]]:
    """Slices of `[B, H]` whose kept rows fit the temporary: many heads when they are small, one when they are large."""
    batch, heads = rows.shape[:2]
    bytes_per_head = kept * rows.shape[3] * rows.element_size()
    block_heads = min(heads, max(1, _BLOCK_BYTES // bytes_per_head))
    block_rows = max(1, _BLOCK_BYTES // (bytes_per_head * heads))
    for row in range(0, batch, block_rows):
        for head in range(0, heads, block_heads):
            yield slice(row, row + block_rows), slice(head, head + block_heads)
