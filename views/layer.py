"""One cached layer at one moment, as scorers and allocators see it."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvstitch.views.queries import QueryStatistics, QueryWindow
from kvstitch.views.rotary import Rotary


@dataclass(frozen=True)
class LayerView:
    """What a scorer or an allocator may see. Nothing here is a copy: read it, never write to it.

    Axes: B batch, H kv heads, G query heads per kv head, T stored slots, W window, D head dim.

    Args:
        keys: `[B, H, T, D]` after RoPE at each token's own position, in the model's dtype, never repeated to query heads.
        values: `[B, H, T, D]`.
        positions: `[B, H, T]` logical (RoPE) position of each slot; ascending over the valid slots of a head; -1 where
            the slot is empty (padding, or a head that kept fewer). Heads differ after the first eviction.
        valid: `[B, H, T]` False where the slot is empty.
        scaling: factor on q.k in the model's attention.
        next_position: `[B]` position that the next token will take.
        layer_idx: index of the decoder layer.
        num_layers: decoder layers of the model.
        queries: recent queries, if `Needs.queries` asked for them.
        statistics: running sums, if `Needs.statistics` asked for them.
        rotary: the model's RoPE for this layer, if `Needs.rotary` asked for it.
        spaced: every so-manieth of a longer stretch, in any order, if `Needs.spaced_queries` asked for them.
    """

    keys: Float[Tensor, "B H T D"]
    values: Float[Tensor, "B H T D"]
    positions: Int64[Tensor, "B H T"]
    valid: Bool[Tensor, "B H T"]
    scaling: float
    next_position: Int64[Tensor, "B"]
    layer_idx: int
    num_layers: int
    queries: QueryWindow | None = None
    statistics: QueryStatistics | None = None
    rotary: Rotary | None = None
    spaced: QueryWindow | None = None
