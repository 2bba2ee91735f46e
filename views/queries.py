"""Queries that the press has kept for scorers and allocators."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex64, Float, Float32, Int64
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

    def spaced(self, step: int, tokens: int) -> "QueryWindow":
        """Of the last `tokens` positions of each row the newest query and, before it, those at every `step`-th.

        Which positions count does not depend on the present one: query p is among them if p + 1 is a multiple of `step`.
        So a few can be kept as they come, and a row is what it is without its padding. Positions that leave gaps may leave
        out those that count.

        Returns: `ceil(tokens / step)` queries a row, oldest first; position -1 where a row has fewer.
        """
        newest = self.positions.amax(dim=1, keepdim=True)
        chosen = (on_grid(self.positions, step) | (self.positions == newest)) & (self.positions > newest - tokens)
        return self.newest_of(chosen, num_spaced(step, tokens))

    def newest_of(self, chosen: Bool[Tensor, "B W"], count: int) -> "QueryWindow":
        """The newest `count` of the chosen queries of each row, oldest first; position -1 where a row has fewer."""
        order = torch.arange(chosen.shape[1], device=chosen.device)
        ranked = torch.where(chosen & self.valid, order, -1).topk(min(count, chosen.shape[1])).values.flip(-1)
        place = ranked.clamp(min=0)
        _, heads, _, dim = self.rotated.shape
        rotated = self.rotated.gather(2, place[:, None, :, None].expand(-1, heads, -1, dim))
        return QueryWindow(rotated, self.positions.gather(1, place).masked_fill(ranked < 0, -1))


def num_spaced(step: int, tokens: int) -> int:
    """Queries of `QueryWindow.spaced`."""
    return -(-tokens // step)


def on_grid(positions: Int64[Tensor, "..."], step: int) -> Bool[Tensor, "..."]:
    """Positions p with p + 1 a multiple of `step`; padding (-1) is not among them."""
    return ((positions + 1) % step == 0) & (positions >= 0)


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
