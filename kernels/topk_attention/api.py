"""Causal attention with the top-k weights of each query (the graph construction of CommunityKV, arXiv 2610.00418)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvstitch.kernels.common.dispatch import require_triton_dtype, resolve_implementation
from kvstitch.kernels.topk_attention.reference import topk_attention_reference

AGGREGATIONS = ("query_group", "per_head")
GROUP_MEANS = ("exact", "merged")


class TopKAttention(NamedTuple):
    """`output` `[B, Q, N, D]` in the query's dtype; `weights` and `indices` as in `TopKEdges`."""

    output: Tensor
    weights: Tensor
    indices: Tensor


class TopKEdges(NamedTuple):
    """The largest attention weights of each query, descending, equal ones by ascending key.

    `weights` `[B, H, N, k]` (`[B, Q, N, k]` per head) float32 (float64 for float64 inputs): softmax over all visible
    keys, sinks included, never renormalised over what is kept. `indices` int32: column of `key`; -1, with weight 0,
    where a query sees fewer than k keys outside the sinks or the weight is exactly zero in float32. A query that sees a NaN
    has no meaningful edges.
    """

    weights: Tensor
    indices: Tensor


def topk_attention(
    query: Float[Tensor, "B Q N D"],
    key: Float[Tensor, "B H T D"],
    value: Float[Tensor, "B H T D2"],
    scaling: float,
    top_k: int,
    num_sinks: int = 0,
    aggregation: str = "query_group",
    group_mean: str = "exact",
    first_key: Int[Tensor, "B"] | None = None,
    softcap: float | None = None,
    sink_logits: Float[Tensor, "Q"] | None = None,
    query_stride: int = 1,
    impl: str = "auto",
) -> TopKAttention:
    """Causal attention, and for each query its top-k weights outside the sinks. Memory is linear in N and T.

    For inference: nothing is differentiated.

    Query i is the token of key `T - N + i`, so a chunk of a longer prefill passes its own queries and all keys so far.

    Args:
        query: Q = H * G heads, head `h * G + g` reads kv head h; after RoPE.
        key: never repeated to query heads.
        value: as `key`.
        scaling: factor on q.k.
        top_k: edges per query; the Triton kernels take at most 32.
        num_sinks: the first keys of each row (after its padding) that get no edge, though they keep their mass.
        aggregation: "query_group" ranks keys by the mean weight over the G heads that share a kv head; "per_head" gives
            every query head its own edges.
        group_mean: how "query_group" takes the mean. "exact" needs each head's log-sum-exp before weights of different
            heads can be added: a second pass over the keys on a GPU, nothing extra in the reference, which holds whole
            rows. "merged" is one pass: it takes the top-k of each head and sums, for each key, the exact weights of the
            heads that list it (divided by G): never above the true mean, and a key that is (k+1)-th in every head is
            missed.
        first_key: first real key of each row under left padding. Queries before it get zeros and no edges.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sink_logits: learned logit of each query head that takes mass and has no value (GPT-OSS).
        query_stride: tokens of a row whose number, from 1 and without padding, is no multiple of this get no edges.
            Spares the reference their selection; the Triton kernels do it and drop it.
        impl: "auto" (Triton on CUDA tensors), "triton", "reference".

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
        TypeError: "triton" for float64.
    """
    _check(query, key, top_k, num_sinks, aggregation, group_mean, softcap, query_stride)
    options = (scaling, top_k, num_sinks, aggregation, group_mean, first_key, softcap, sink_logits, None)
    return TopKAttention(*_run(impl, query, key, value, options, query_stride))


def topk_edges(
    query: Float[Tensor, "B Q N D"],
    key: Float[Tensor, "B H T D"],
    scaling: float,
    top_k: int,
    num_sinks: int = 0,
    aggregation: str = "query_group",
    group_mean: str = "exact",
    first_key: Int[Tensor, "B"] | None = None,
    softcap: float | None = None,
    sink_logits: Float[Tensor, "Q"] | None = None,
    logsumexp: Float[Tensor, "B Q N"] | None = None,
    query_stride: int = 1,
    impl: str = "auto",
) -> TopKEdges:
    """The edges of `topk_attention` alone, for a prefill whose attention already ran elsewhere.

    Args: as `topk_attention`, and
        logsumexp: natural log-sum-exp of each query's logits (sink logit included), if the attention that ran returned
            it; saves the pass that would find it. Entries of padded queries are not read.
        query_stride: as there, and the reference does not look at the other queries at all.

    Raises: as `topk_attention`.
    """
    _check(query, key, top_k, num_sinks, aggregation, group_mean, softcap, query_stride)
    options = (scaling, top_k, num_sinks, aggregation, group_mean, first_key, softcap, sink_logits, logsumexp)
    return TopKEdges(*_run(impl, query, key, None, options, query_stride)[1:])


def _check(query, key, top_k, num_sinks, aggregation, group_mean, softcap, query_stride):
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {query.shape[1]} and {key.shape[1]}")
    if query.shape[2] > key.shape[2]:
        raise ValueError(f"query i is key T - N + i, so N must not exceed T; got N={query.shape[2]}, T={key.shape[2]}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if query_stride < 1:
        raise ValueError(f"query_stride must be at least 1 (edges for every query), got {query_stride}")
    if num_sinks < 0:
        raise ValueError(f"num_sinks must be at least 0, got {num_sinks}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, or None for none, got {softcap}")
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(map(repr, AGGREGATIONS))}, got {aggregation!r}")
    if group_mean not in GROUP_MEANS:
        raise ValueError(f"group_mean must be one of {', '.join(map(repr, GROUP_MEANS))}, got {group_mean!r}")


def _run(
    impl: str, query: Tensor, key: Tensor, value: Tensor | None, options: tuple, query_stride: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    top_k, first_key = options[1], options[5]
    if resolve_implementation(impl, query) == "reference":
        return topk_attention_reference(query, key, value, *options, query_stride)
    require_triton_dtype("query", query)
    if top_k > 32:
        raise ValueError(f"the Triton kernel keeps at most 32 edges per query, got top_k={top_k}")
    from kvstitch.kernels.topk_attention.triton import topk_attention_triton

    output, weights, indices = topk_attention_triton(query, key, value, *options)
    if query_stride > 1:
        first = 0 if first_key is None else first_key.view(-1, 1, 1, 1)
        number = torch.arange(key.shape[2] - query.shape[2] + 1, key.shape[2] + 1, device=query.device)
        left_out = (number[:, None] - first) % query_stride != 0
        weights, indices = weights.masked_fill(left_out, 0), indices.masked_fill(left_out, -1)
    return output, weights, indices
