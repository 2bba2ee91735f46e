"""What the bench times of sparse decoding, and the least work that it must do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstitch.kernels.sparse_decode.api import SparseDecode, sparse_decode


@dataclass(frozen=True)
class SparseDecodeWorkload:
    """One decode step that reads `budget` of `length` slots.

    Args:
        batch, query_heads, heads, length, head_dim: shape; the defaults are one layer of Qwen3-8B at 64k.
        budget: slots read per kv head.
        top_k: weights returned for the community update; 0 for none.
        dtype: name of a torch dtype.
    """

    batch: int = 1
    query_heads: int = 32
    heads: int = 8
    length: int = 65536
    head_dim: int = 128
    budget: int = 4096
    top_k: int = 8
    dtype: str = "bfloat16"

    def inputs(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        new = lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=dtype)
        cache = (self.batch, self.heads, self.length, self.head_dim)
        order = torch.rand(cache[:3], generator=generator, device=device).argsort(dim=-1)
        return {
            "query": new(self.batch, self.query_heads, 1, self.head_dim),
            "keys": new(*cache),
            "values": new(*cache),
            "slots": order[..., : self.budget].contiguous(),
        }

    def run(self, inputs: dict[str, Tensor], impl: str) -> SparseDecode:
        return sparse_decode(**inputs, scaling=self.head_dim**-0.5, top_k=self.top_k, impl=impl)

    def baseline(self, inputs: dict[str, Tensor]) -> Tensor:
        """Dense attention, the query heads of a kv head folded into rows."""
        rows = inputs["query"].reshape(self.batch, self.heads, -1, self.head_dim)
        return torch.nn.functional.scaled_dot_product_attention(rows, inputs["keys"], inputs["values"])

    def floor_flops(self) -> int:
        return 4 * self.batch * self.query_heads * self.budget * self.head_dim

    def floor_bytes(self) -> int:
        """The chosen keys and values and the slot lists once."""
        element = getattr(torch, self.dtype).itemsize
        return self.batch * self.heads * self.budget * (2 * self.head_dim * element + 8)
