"""Attention of a window of recent queries over the stored slots, at true positions.

Two dense products and a softmax are what there is to do, so plain torch serves every device.
"""

from collections.abc import Sequence

from jaxtyping import Float, Float32, Int64
from torch import Tensor

from kvstitch.kernels.window_attention.reference import window_attention_reference, window_usage_reference


def window_attention(
    queries: Float[Tensor, "B Q W D"],
    query_positions: Int64[Tensor, "B W"],
    keys: Float[Tensor, "B H T D"],
    positions: Int64[Tensor, "B H T"],
    scaling: float,
) -> Float32[Tensor, "B H G W T"]:
    """Softmax of `scaling * q . k` over every slot that the query sees, in float32 (SnapKV, arXiv 2404.14469).

    A query sees a slot iff `0 <= positions[slot] <= query position`, wherever the slot lies.

    Args:
        queries: after RoPE at their own positions; Q = H * G, head `h * G + g` reads kv head h.
        query_positions: -1 where a row has no query; such a row of the result is zero.
        keys: after RoPE, never repeated to query heads.
        positions: -1 on empty slots, whose keys may hold anything; their columns are zero.
        scaling: factor on q.k.

    Returns: probabilities; a row sums to 1, or is zero if the query sees no slot.
    Raises: ValueError if the shapes disagree.
    """
    _check_shapes(queries, query_positions, keys, positions)
    return window_attention_reference(queries, query_positions, keys, positions, scaling)


def window_usage(
    queries: Float[Tensor, "B Q W D"],
    query_positions: Int64[Tensor, "B W"],
    keys: Float[Tensor, "B H T D"],
    positions: Int64[Tensor, "B H T"],
    scaling: float,
) -> Float32[Tensor, "B H T"]:
    """`window_attention` averaged over the queries that see the slot and over the G query heads, in fewer passes.

    A slot that no query sees, and an empty one, is used 0. Arguments and errors as in `window_attention`.
    """
    return window_usage_layers([queries], query_positions, [keys], positions, [scaling])


def window_usage_layers(
    queries: Sequence[Float[Tensor, "B Q W D"]],
    query_positions: Int64[Tensor, "S W"],
    keys: Sequence[Float[Tensor, "B H T D"]],
    positions: Int64[Tensor, "S H T"],
    scaling: Sequence[float],
) -> Float32[Tensor, "S H T"]:
    """`window_usage` of several layers of equal shape; S = L * B, layer after layer.

    Args:
        queries, keys, scaling: one entry a layer.
        query_positions, positions: the layers' own, concatenated along the batch.
    """
    batch = keys[0].shape[0]
    for layer, (own, key) in enumerate(zip(queries, keys)):
        rows = slice(layer * batch, (layer + 1) * batch)
        _check_shapes(own, query_positions[rows], key, positions[rows])
    return window_usage_reference(queries, query_positions, keys, positions, scaling)


def _check_shapes(queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor) -> None:
    batch, heads, slots, head_dim = keys.shape
    expected = {
        "queries": (queries, (batch, queries.shape[1], query_positions.shape[-1], head_dim)),
        "query_positions": (query_positions, (batch, queries.shape[2])),
        "positions": (positions, (batch, heads, slots)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} for keys of {tuple(keys.shape)}, got {tuple(tensor.shape)}"
            )
    if queries.shape[1] % heads:
        raise ValueError(f"query heads must be a multiple of the {heads} kv heads, got {queries.shape[1]}")
    if slots == 0 or query_positions.shape[-1] == 0:
        raise ValueError(f"need at least one slot and one query, got {slots} and {query_positions.shape[-1]}")
