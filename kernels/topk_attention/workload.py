"""What the bench times of top-k attention, and the least work that it must do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstitch.kernels.topk_attention.api import TopKAttention, topk_attention


@dataclass(frozen=True)
class TopKAttentionWorkload:
    """A prefill of `tokens` tokens. Its logits have no structure, which is the hardest case for the threshold test.

    Args:
        batch, query_heads, heads, tokens, head_dim: shape; the defaults are one layer of Qwen3-8B at 8k.
        top_k, num_sinks, aggregation, group_mean: as `topk_attention`.
        dtype: name of a torch dtype.
    """

    batch: int = 1
    query_heads: int = 32
    heads: int = 8
    tokens: int = 8192
    head_dim: int = 128
    top_k: int = 8
    num_sinks: int = 10
    aggregation: str = "query_group"
    group_mean: str = "merged"
    dtype: str = "bfloat16"

    def inputs(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        shape = lambda heads: (self.batch, heads, self.tokens, self.head_dim)
        new = lambda heads: torch.randn(
            shape(heads), generator=generator, device=device, dtype=getattr(torch, self.dtype)
        )
        return {"query": new(self.query_heads), "key": new(self.heads), "value": new(self.heads)}

    def run(self, inputs: dict[str, Tensor], impl: str) -> TopKAttention:
        return topk_attention(
            **inputs,
            scaling=self.head_dim**-0.5,
            top_k=self.top_k,
            num_sinks=self.num_sinks,
            aggregation=self.aggregation,
            group_mean=self.group_mean,
            impl=impl,
        )

    def baseline(self, inputs: dict[str, Tensor]) -> Tensor:
        """The same attention without edges."""
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(inputs["query"], inputs["key"], inputs["value"], is_causal=True, enable_gqa=True)

    def floor_flops(self) -> int:
        """Two products over the causal half; the selection counts as nothing."""
        pairs = self.tokens * (self.tokens + 1) // 2
        return 4 * self.batch * self.query_heads * pairs * self.head_dim

    def floor_bytes(self) -> int:
        """Queries, keys, values and output once, and the lists."""
        element = getattr(torch, self.dtype).itemsize
        graph_heads = self.heads if self.aggregation == "query_group" else self.query_heads
        rows = 2 * self.query_heads + 2 * self.heads
        lists = 8 * graph_heads * self.top_k
        return self.batch * self.tokens * (rows * self.head_dim * element + lists)
