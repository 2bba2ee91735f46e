"""Queries that the press has kept for scorers and allocators."""

from dataclasses import dataclass

from jaxtyping import Complex64, Float, Float32, Int64
from torch import Tensor

from kvstitch.views.rotary import Rotary


@dataclass(frozen=True)
class QueryWindow:
    """The most recent queries of one layer, oldest first, exactly as attention received them.

    Args:
        rotated: `[B, Q, W, D]` after RoPE at their own true positions; Q = H * G query heads, head `h * G + g` reads
            kv head `h`.
        positions: `[B, W]` their positions; -1 where a row has no query (padding, or fewer than W tokens seen).
    """

    rotated: Float[Tensor, "B Q W D"]
    positions: Int64[Tensor, "B W"]

    @property
    def valid(self) -> Tensor:
        """`[B, W]` bool: False where the row has no query."""
        return self.positions >= 0

    def unrotated(self, rotary: Rotary) -> Float[Tensor, "B Q W D"]:
        """The queries before RoPE (after q-norm, if the model has one); entries that are not valid are meaningless."""
        return rotary.unrotate(self.rotated, self.positions.clamp(min=0))

    def last(self, count: int) -> "QueryWindow":
        """The newest `count` queries (all of them if fewer are held)."""
        return QueryWindow(self.rotated[:, :, -count:], self.positions[:, -count:])

    def every(self, step: int) -> "QueryWindow":
        """Every `step`-th query, counted from the newest back, which is among them."""
        first = (self.positions.shape[1] - 1) % step
        return QueryWindow(self.rotated[:, :, first::step], self.positions[:, first::step])


@dataclass(frozen=True)
class QueryStatistics:
    """Running sums over the pre-RoPE queries that a layer has seen, in the complex view of `Rotary.all_planes`.

    Args:
        count: `[B]` queries summed; the first four tokens of a row and padding are left out.
        total: `[B, Q, F]` sum of q.
        modulus: `[B, Q, F]` sum of |q|.
        square: `[B, Q, F]` sum of |q|^2.
    """

    count: Int64[Tensor, "B"]
    total: Complex64[Tensor, "B Q F"]
    modulus: Float32[Tensor, "B Q F"]
    square: Float32[Tensor, "B Q F"]
