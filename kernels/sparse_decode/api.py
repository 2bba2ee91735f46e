"""Exact attention over chosen slots (the decode step of CommunityKV, arXiv 2610.00418; split as in flash-decoding)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from kvstitch.kernels.common import ranges
from kvstitch.kernels.common.dispatch import require_triton_dtype, resolve_implementation
from kvstitch.kernels.sparse_decode.reference import sparse_decode_reference


class SparseDecode(NamedTuple):
    """`output` `[B, Q, 1, D]`; with `top_k`, `weights` float32 and `slots` int32 `[B, S, k]`, else None.

    `weights` are softmax weights over the chosen slots (and the sink logit), mean over the query heads of a selection,
    descending, equal ones by ascending slot. A slot of -1 has weight 0: fewer than k candidates weigh anything.
    `logsumexp`, if asked for, `[B, Q]` float32 (float64 for float64): natural, of the logits of the chosen slots and the
    sink logit, -inf over nothing; by it the output is joined with attention to something else.
    """

    output: Tensor
    weights: Tensor | None
    slots: Tensor | None
    logsumexp: Tensor | None = None


def sparse_decode(
    query: Float[Tensor, "B Q 1 D"],
    keys: Float[Tensor, "B H T D"],
    values: Float[Tensor, "B H T D2"],
    slots: Int[Tensor, "B S M"],
    scaling: float,
    softcap: float | None = None,
    sink_logits: Float[Tensor, "Q"] | None = None,
    top_k: int = 0,
    first_candidate: int = 0,
    return_logsumexp: bool = False,
    impl: str = "auto",
) -> SparseDecode:
    """One query token over the slots that were chosen for it; the cost does not depend on T.

    Args:
        query: Q = H * G heads, head `h * G + g` reads kv head h.
        keys: the cache, or a view of it; never copied whole, never repeated to query heads.
        values: as `keys`.
        slots: distinct slots to attend to, in any order, -1 anywhere for none. S selections: H (one per kv head) or a
            multiple of it up to Q (Q: each query head its own); consecutive query heads share one. A selection of
            nothing gives output 0.
        scaling: factor on q.k.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sink_logits: learned logit of each query head that takes mass and has no value (GPT-OSS).
        top_k: return the largest weights too (0: no); the Triton kernels take at most 32.
        first_candidate: columns of `slots` before it are attended to, but not reported (put sinks there).
        return_logsumexp: see `SparseDecode`.
        impl: "auto" (Triton on CUDA tensors), "triton", "reference".

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
        TypeError: "triton" for float64.
    """
    query_heads, heads, selections = query.shape[1], keys.shape[1], slots.shape[1]
    if query_heads % selections or selections % heads:
        raise ValueError(
            "slots must hold one list per kv head, per query head, or a number between that divides evenly; got "
            f"{selections} lists for {heads} kv heads and {query_heads} query heads"
        )
    if slots.shape[2] == 0:
        raise ValueError("slots must have at least one column; -1 stands for no slot")
    if top_k < 0 or first_candidate < 0:
        raise ValueError(f"top_k and first_candidate must not be negative, got {top_k} and {first_candidate}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, or None for none, got {softcap}")
    options = (query, keys, values, slots, scaling, softcap, sink_logits, top_k, first_candidate, return_logsumexp)
    if resolve_implementation(impl, query) == "reference":
        return SparseDecode(*sparse_decode_reference(*options))
    require_triton_dtype("query", query)
    if top_k > 32:
        raise ValueError(f"the Triton kernel returns at most 32 weights, got top_k={top_k}")
    from kvstitch.kernels.sparse_decode.triton import sparse_decode_triton

    return SparseDecode(*sparse_decode_triton(*options))


def expand_ranges(
    starts: Int[Tensor, "B S C"],
    lengths: Int[Tensor, "B S C"],
    width: int,
) -> Int64[Tensor, "B S width"]:
    """Slot lists from contiguous ranges, in the order given, without looking at a value on the host.

    Communities whose members lie together in memory are read this way.

    Args:
        starts: first slot of each range.
        lengths: slots of each range, 0 for none.
        width: columns of the result. What does not fit is cut off: the last range that fits in part is shortened.

    Returns: -1 after the last slot.
    """
    lengths = lengths.long()
    ends = lengths.cumsum(dim=-1)
    steps = ranges.unit_steps(width, starts.device)
    slots = ranges.expand_ranges(starts.long(), lengths, ends, steps)[..., :width]
    return slots.masked_fill(torch.arange(width, device=starts.device) >= ends[..., -1:], -1)
