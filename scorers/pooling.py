"""Pooling along the surviving sequence of each head."""

import torch
from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn import functional as F

from kvstitch.scorers.masking import PackedOrder

EDGES = ("valid", "zero")


def average_pool(
    x: Float32[Tensor, "B H T"], valid: Bool[Tensor, "B H T"], kernel_size: int, edges: str
) -> Float32[Tensor, "B H T"]:
    """Mean of `x` over `kernel_size` neighbouring valid slots.

    Args:
        kernel_size: odd; 1 leaves `x` as it is.
        edges: what the divisor is where the kernel reaches past the first or last valid slot: "valid" counts the taps
            that exist, "zero" always divides by `kernel_size`, which damps the ends.
    """
    if kernel_size == 1:
        return x
    half = kernel_size // 2
    order = PackedOrder.of(valid)
    pooled = F.avg_pool1d(order.pack(x, 0.0), kernel_size, stride=1, padding=half)
    pooled = order.unpack(pooled)
    if edges == "zero":
        return pooled
    taps = torch.minimum(order.rank + half, order.count - 1) - (order.rank - half).clamp(min=0) + 1
    return pooled * (kernel_size / taps.clamp(min=1))


def max_pool(x: Float32[Tensor, "B H T"], valid: Bool[Tensor, "B H T"], kernel_size: int) -> Float32[Tensor, "B H T"]:
    """Largest of `x` over `kernel_size` (odd) neighbouring valid slots; no slot past the ends takes part."""
    if kernel_size == 1:
        return x
    order = PackedOrder.of(valid)
    pooled = F.max_pool1d(order.pack(x, float("-inf")), kernel_size, stride=1, padding=kernel_size // 2)
    return order.unpack(pooled)
