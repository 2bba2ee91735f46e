"""The queries that a cache layer remembers for scorers: a ring of recent ones and sums over all of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstitch.views import Needs, QueryStatistics, QueryWindow, Rotary

# Queries of the first tokens point at themselves and at the attention sink; they say nothing about later ones.
_SKIPPED_FIRST_TOKENS = 4


class QueryMemory:
    """Ring of the newest `[B, Q, R, D]` queries as attention received them, with their positions `[B, R]`.

    Writing one token costs two row copies into storage that never grows. Sums are folded in when the ring has turned once
    or somebody looks, so that no query is missed and no step pays for them.
    """

    def __init__(self, needs: Needs, rotary: Rotary | None):
        self._needs = needs
        self._rotary = rotary
        self._size = max(needs.queries, 64) if needs.statistics else needs.queries
        self._queries: Tensor | None = None
        self._positions: Tensor | None = None
        self._next = 0
        self._unfolded = 0
        self._sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def remember(self, query: Tensor, positions: Tensor) -> None:
        """Take in the queries `[B, Q, N, D]` of one forward; positions `[B, N]`, -1 for padding."""
        if self._size == 0:
            return
        query, positions = query.detach(), positions.to(query.device)
        if self._queries is None:
            batch, heads, _, dim = query.shape
            self._queries = query.new_zeros(batch, heads, self._size, dim)
            self._positions = positions.new_full((batch, self._size), -1)
        count = query.shape[2]
        if self._needs.statistics:
            if self._unfolded + count > self._size:
                self._fold_ring()
            if count > self._size:
                self._fold(query[:, :, : -self._size], positions[:, : -self._size])
            self._unfolded += min(count, self._size)
        if count >= self._size:
            self._queries.copy_(query[:, :, -self._size :])
            self._positions.copy_(positions[:, -self._size :])
            self._next = 0
            return
        first = min(count, self._size - self._next)
        self._write(self._next, query[:, :, :first], positions[:, :first])
        if first < count:
            self._write(0, query[:, :, first:], positions[:, first:])
        self._next = (self._next + count) % self._size

    @property
    def ready(self) -> bool:
        """Whether what is needed is there: at least one query, or nothing is needed."""
        return self._size == 0 or self._queries is not None

    def window(self) -> QueryWindow | None:
        """The newest `needs.queries` queries, oldest first; None if none are kept."""
        if self._needs.queries == 0 or self._queries is None:
            return None
        queries, positions = self._queries, self._positions
        # A roll copies; most intervals are multiples of the ring's size, and then it is in order as it stands.
        if self._next:
            queries, positions = queries.roll(-self._next, dims=2), positions.roll(-self._next, dims=1)
        return QueryWindow(queries, positions).last(self._needs.queries)

    def statistics(self) -> QueryStatistics | None:
        """Sums over every query so far; None if they were not asked for."""
        if not self._needs.statistics or self._queries is None:
            return None
        self._fold_ring()
        return QueryStatistics(*self._sums)

    def fresh(self) -> "QueryMemory":
        """An empty memory with the same settings."""
        return QueryMemory(self._needs, self._rotary)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation (reorder, repeat, select) to everything remembered."""
        if self._queries is not None:
            self._queries, self._positions = function(self._queries), function(self._positions)
        if self._sums is not None:
            self._sums = tuple(function(tensor) for tensor in self._sums)

    def require_nothing_forgotten(self) -> None:
        """Refuse a roll-back: the ring has written over older queries, and sums hold the removed ones.

        Raises:
            RuntimeError: queries or sums are remembered.
        """
        if self._queries is not None:
            raise RuntimeError(
                "the cache cannot be rolled back under a scorer or allocator that looks at queries: those before the removed "
                "tokens are gone; copy the cache (copy.deepcopy) before what you want to undo"
            )

    def _write(self, start: int, query: Tensor, positions: Tensor) -> None:
        self._queries[:, :, start : start + query.shape[2]] = query
        self._positions[:, start : start + query.shape[2]] = positions

    def _fold_ring(self) -> None:
        """Add the ring's entries that the sums do not hold yet."""
        if self._sums is None:
            self._fold(self._queries[:, :, :0], self._positions[:, :0])
        if self._unfolded == 0:
            return
        newest = torch.arange(self._next - self._unfolded, self._next, device=self._positions.device) % self._size
        self._fold(self._queries[:, :, newest], self._positions[:, newest])
        self._unfolded = 0

    def _fold(self, query: Tensor, positions: Tensor) -> None:
        counted = positions >= _SKIPPED_FIRST_TOKENS
        plain = self._rotary.all_planes(self._rotary.unrotate(query.float(), positions.clamp(min=0)))
        plain = torch.where(counted[:, None, :, None], plain, 0)
        modulus = plain.abs()
        new = (counted.sum(1), plain.sum(2), modulus.sum(2), modulus.square().sum(2))
        self._sums = new if self._sums is None else tuple(old + add for old, add in zip(self._sums, new))
