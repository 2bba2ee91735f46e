"""Causal attention that also reports, for each query, the keys with the largest weights."""

from kvstitch.kernels.topk_attention.api import TopKAttention, TopKEdges, topk_attention, topk_edges

__all__ = ["TopKAttention", "TopKEdges", "topk_attention", "topk_edges"]
