"""In-place compaction of slot-aligned tensors."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from kvstitch.kernels.common.dispatch import resolve_implementation
from kvstitch.kernels.compact.reference import compact_reference


def compact(
    tensors: Sequence[Tensor],
    slots: Int[Tensor, "B H K"],
    fills: Sequence[float | int | None] | None = None,
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
        slots: strictly ascending in each head, then -1 to the end where a head keeps fewer than K. Not checked: it
            would cost a synchronisation.
        fills: for each tensor, what to write where `slots` is -1 (-1 for positions), or None to leave what is there.
        impl: "auto" (Triton on CUDA tensors), "triton", "reference".

    Raises: ValueError for tensors that do not share `[B, H]` with `slots` or are shorter than K.
    """
    fills = [None] * len(tensors) if fills is None else list(fills)
    if len(fills) != len(tensors):
        raise ValueError(f"fills must have one entry per tensor, got {len(fills)} for {len(tensors)} tensors")
    for tensor in tensors:
        if tensor.shape[:2] != slots.shape[:2] or tensor.shape[2] < slots.shape[2]:
            raise ValueError(
                f"tensors must be [B, H, T, ...] with [B, H] = {list(slots.shape[:2])} and T >= {slots.shape[2]}, got "
                f"{list(tensor.shape)}"
            )
    if not tensors or not slots.numel():
        return
    if resolve_implementation(impl, tensors[0]) == "reference":
        return compact_reference(tensors, slots, fills)
    from kvstitch.kernels.compact.triton import compact_triton

    compact_triton(tensors, slots, fills)
