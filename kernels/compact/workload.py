"""What the bench times of compaction, and the least work that it must do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstitch.kernels.compact.api import compact


@dataclass(frozen=True)
class CompactWorkload:
    """Keys, values and positions of one layer shrink from `length` slots to `kept`.

    Args:
        batch, heads, length, head_dim: shape; the defaults are one layer of Qwen3-8B.
        kept: slots that stay.
        dtype: name of a torch dtype.
    """

    batch: int = 1
    heads: int = 8
    length: int = 8192
    head_dim: int = 128
    kept: int = 4096
    dtype: str = "bfloat16"

    def inputs(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        cache = (self.batch, self.heads, self.length, self.head_dim)
        new = lambda: torch.randn(cache, generator=generator, device=device, dtype=getattr(torch, self.dtype))
        order = torch.rand(cache[:3], generator=generator, device=device).argsort(dim=-1)
        return {
            "keys": new(),
            "values": new(),
            "positions": torch.arange(self.length, device=device, dtype=torch.int32).expand(cache[:3]).contiguous(),
            "slots": order[..., : self.kept].sort(dim=-1).values,
        }

    def run(self, inputs: dict[str, Tensor], impl: str) -> None:
        """In place: run again on the same inputs it moves the same number of bytes."""
        compact([inputs["keys"], inputs["values"], inputs["positions"]], inputs["slots"], [None, None, -1], impl=impl)

    def baseline(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A new cache, gathered through an expanded index."""
        index = inputs["slots"][..., None].expand(-1, -1, -1, self.head_dim)
        return inputs["keys"].gather(2, index), inputs["values"].gather(2, index)

    def floor_flops(self) -> int:
        return 0

    def floor_bytes(self) -> int:
        """Every kept row read once and written once, and the slot lists."""
        element = getattr(torch, self.dtype).itemsize
        row = 2 * self.head_dim * element + 8
        return self.batch * self.heads * self.kept * (2 * row + 8)
