"""Compaction of slot-aligned tensors, in place or into new storage."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvstitch.kernels.common.dispatch import resolve_implementation
from kvstitch.kernels.compact.reference import compact_reference


def compact(
    tensors: Sequence[Tensor],
    slots: Int[Tensor, "B H K"],
    fills: Sequence[float | int | None] | None = None,
    out: Sequence[Tensor] | None = None,
    check: bool | None = None,
    impl: str = "auto",
) -> None:
    """`tensor[b, h, j] = tensor[b, h, slots[b, h, j]]` for j < K, in place; slots from K on keep what they held.

    Each kept row is read once and written once; nothing else moves.

    Why in place is legal: slots ascend strictly, so `slots[j] >= j`, and j' > j implies `slots[j'] > slots[j] >= j`.
    Writing row j therefore never destroys a row that a later j' still reads, as long as rows are written in ascending
    order, or in blocks that are read whole before they are written.

    Args:
        tensors: `[B, H, T, ...]` each, T >= K: keys, values, positions and any other state that goes with the slots;
            views of larger storage are written through.
        slots: strictly ascending in each head, then -1 to the end where a head keeps fewer than K.
        fills: for each tensor, what to write where `slots` is -1 (-1 for positions), or None to leave what is there;
            with `out`, where nothing is there yet, None writes 0.
        out: where each tensor's rows go instead, `[B, H, K, ...]`; `tensors` then stay as they are, and their storage
            can be given back. The order of slots is then free.
        check: whether `slots` are looked at. None: only in place and on a CPU, where a look waits for nobody. True: on a
            GPU too, by an assertion on the device, which needs no host synchronisation either but costs launches and, if
            it fails, the process its GPU: for debugging.
        impl: "auto" (Triton on CUDA tensors), "triton", "reference".

    Raises: ValueError for tensors that do not share `[B, H]` with `slots` or are shorter than K, for `out` of another
        shape, and on a CPU for slots that do not ascend.
    """
    fills = [None] * len(tensors) if fills is None else list(fills)
    if len(fills) != len(tensors):
        raise ValueError(f"fills must have one entry per tensor, got {len(fills)} for {len(tensors)} tensors")
    for tensor in tensors:
        if tensor.shape[:2] != slots.shape[:2] or (out is None and tensor.shape[2] < slots.shape[2]):
            raise ValueError(
                f"tensors must be [B, H, T, ...] with [B, H] = {list(slots.shape[:2])} and T >= {slots.shape[2]}, got "
                f"{list(tensor.shape)}"
            )
    if out is not None:
        _check_out(tensors, slots, out)
        fills = [0 if fill is None else fill for fill in fills]
    chosen = resolve_implementation(impl, tensors[0] if tensors else slots)
    if not tensors or not slots.numel():
        return
    if check or (check is None and out is None and not slots.is_cuda):
        _require_ascending(slots)
    if chosen == "reference":
        return compact_reference(tensors, slots, fills, out)
    from kvstitch.kernels.compact.triton import compact_triton

    compact_triton(tensors, slots, fills, out)


def _check_out(tensors: Sequence[Tensor], slots: Tensor, out: Sequence[Tensor]) -> None:
    if len(out) != len(tensors):
        raise ValueError(f"out must have one entry per tensor, got {len(out)} for {len(tensors)} tensors")
    for tensor, target in zip(tensors, out):
        wanted = (*slots.shape, *tensor.shape[3:])
        if target.shape != wanted or target.dtype != tensor.dtype or not target.is_contiguous():
            raise ValueError(
                f"out must be contiguous {tensor.dtype} {list(wanted)}, got {target.dtype} {list(target.shape)} with "
                f"strides {target.stride()}"
            )


def _require_ascending(slots: Tensor) -> None:
    before, after = slots[..., :-1], slots[..., 1:]
    # After a -1 only -1 may come.
    ascending = ((after > before) & (before >= 0)) | (after < 0)
    if slots.is_cuda:
        torch._assert_async(ascending.all(), "compact: slots must ascend strictly, with -1 at the end only")
        return
    if not bool(ascending.all()):
        row, head = (~ascending).any(dim=-1).nonzero()[0].tolist()
        raise ValueError(
            f"slots must ascend strictly in each head, with -1 at the end only; those of row {row}, head {head} do not"
        )
