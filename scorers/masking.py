"""Arithmetic over the valid slots of a layer, shared by the scorers.

What stands on an empty slot may be anything, NaN included, so it is replaced and never multiplied away.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


def without_empty(x: Float[Tensor, "B H T D"], valid: Bool[Tensor, "B H T"]) -> Float32[Tensor, "B H T D"]:
    """`x` in float32 with zeros on the empty slots; `x` itself if it is so already, so never to be written to."""
    if not x.is_cuda and bool(valid.all()):
        # A pass over all keys takes longer than this look, for which a GPU would be waited for.
        return x.float()
    return torch.where(valid[..., None], x, x.new_zeros(())).float()


def softmax_over(logits: Float32[Tensor, "*S T"], members: Bool[Tensor, "*M T"]) -> Float32[Tensor, "*S T"]:
    """Softmax along the last axis among `members` (broadcast); zero elsewhere, also if there is no member."""
    return logits.masked_fill(~members, LOWEST).softmax(dim=-1).masked_fill(~members, 0.0)


@dataclass(frozen=True)
class PackedOrder:
    """Moves values between slots and their order among the valid slots of a head.

    Neighbours are neighbours in the sequence that survives, so holes between them must not count.

    Args:
        rank: `[B, H, T]` how many valid slots of the head stand before this one; T on an empty slot.
        count: `[B, H, 1]` valid slots of the head.
    """

    rank: Int64[Tensor, "B H T"]
    count: Int64[Tensor, "B H 1"]

    @classmethod
    def of(cls, valid: Bool[Tensor, "B H T"]) -> "PackedOrder":
        ends = valid.cumsum(dim=-1)
        return cls(rank=torch.where(valid, ends - 1, valid.shape[-1]), count=ends[..., -1:])

    def pack(self, x: Float32[Tensor, "B H T"], fill: float) -> Float32[Tensor, "B H T"]:
        """Values of the valid slots in order, then `fill`; what `x` holds on empty slots is dropped."""
        batch, heads, slots = x.shape
        # One column more than there are slots takes what the empty slots hold.
        packed = x.new_full((batch, heads, slots + 1), fill).scatter_(2, self.rank, x)
        packed[..., -1] = fill
        return packed[..., :slots]

    def unpack(self, packed: Float32[Tensor, "B H T"]) -> Float32[Tensor, "B H T"]:
        """Inverse of `pack`; empty slots receive some packed value, for the caller to overwrite."""
        return packed.gather(2, self.rank.clamp(max=packed.shape[-1] - 1))
