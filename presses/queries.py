"""The queries that a cache layer remembers for scorers: recent ones, every so-manieth of more, and sums over all."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvstitch.presses.shared_results import SharedResults
from kvstitch.views import Needs, QueryStatistics, QueryWindow, Rotary
from kvstitch.views.queries import num_spaced, on_grid

# Queries of the first tokens point at themselves and at the attention sink; they say nothing about later ones.
_SKIPPED_FIRST_TOKENS = 4
# Least length of a ring that others are filled from: long enough that few steps pay for it, short enough not to be felt in
# memory. Sums cost more to fill.
_THINNED_AT_ONCE, _SUMMED_AT_ONCE = 16, 32


class QueryMemory:
    """Ring of the newest `[B, Q, R, D]` queries as attention received them, and the positions `[B, N]` of their forwards.

    Writing one token costs one row copy into storage that never grows; of positions only the forward's own tensors are held, which
    are the same in all layers. What is kept of older queries (spaced ones, sums) is taken from the ring when it has turned once or
    somebody looks, so that no query is missed and few steps pay for it.

    Args:
        needs: what is remembered.
        rotary: turns queries back for sums.
        shared: where layers of one cache find what another has worked out from the same positions.
    """

    def __init__(self, needs: Needs, rotary: Rotary | None, shared: SharedResults | None = None):
        self._needs = needs
        self._rotary = rotary
        self._shared = SharedResults() if shared is None else shared
        # A ring that is as long holds the spaced ones, too.
        thinned = needs.spaced_queries > needs.queries
        self._spaced = _SpacedQueries(needs.spaced_queries, needs.query_step, self._shared) if thinned else None
        self._sums = _Sums(rotary) if needs.statistics else None
        self._takers = [taker for taker in (self._spaced, self._sums) if taker is not None]
        self._size = max(needs.queries, _THINNED_AT_ONCE * thinned, _SUMMED_AT_ONCE * needs.statistics)
        self._queries: Tensor | None = None
        # Oldest first; together at least as long as what the ring holds.
        self._positions: deque[Tensor] = deque()
        self._num_positions = 0
        self._next = 0

    def remember(self, query: Tensor, positions: Tensor) -> None:
        """Take in the queries `[B, Q, N, D]` of one forward; positions `[B, N]`, -1 for padding, held and never to be changed."""
        if self._size == 0:
            return
        query, positions = query.detach(), self._shared(_on_device, positions, query.device)
        if self._queries is None:
            batch, heads, _, dim = query.shape
            self._queries = query.new_zeros(batch, heads, self._size, dim)
        elif self._queries.is_inference() and not torch.is_inference_mode_enabled():
            # What was made in inference mode can be read outside, but not written.
            self._queries = self._queries.clone()
        count = query.shape[2]
        for taker in self._takers:
            if taker.waiting + count > self._size:
                self._hand_on(taker)
            if count > self._size:
                taker.add(query[:, :, : -self._size], self._shared(_all_but_last, positions, self._size))
            taker.waiting += min(count, self._size)
        self._log(positions)
        if count >= self._size:
            self._queries.copy_(query[:, :, -self._size :])
            self._next = 0
            return
        first = min(count, self._size - self._next)
        self._queries[:, :, self._next : self._next + first] = query[:, :, :first]
        if first < count:
            self._queries[:, :, : count - first] = query[:, :, first:]
        self._next = (self._next + count) % self._size

    @property
    def ready(self) -> bool:
        """Whether what is needed is there: at least one query, or nothing is needed."""
        return self._size == 0 or self._queries is not None

    def window(self) -> QueryWindow | None:
        """The newest `needs.queries` queries, oldest first; None if none are kept."""
        if self._needs.queries == 0 or self._queries is None:
            return None
        queries = self._queries
        # A roll copies; most intervals are multiples of the ring's size, and then it is in order as it stands.
        if self._next:
            queries = queries.roll(-self._next, dims=2)
        return QueryWindow(queries, self._positions_from(0)).last(self._needs.queries)

    def spaced(self) -> QueryWindow | None:
        """`QueryWindow.spaced` of all queries so far, in any order; None if such are not asked for.

        The newest is that of the last column, which in a row padded on the right is none. Where positions leave gaps, an older
        one may be missing whose place the newest has taken.
        """
        if self._needs.spaced_queries == 0 or self._queries is None:
            return None
        if self._spaced is None:
            return self.window().spaced(self._needs.query_step, self._needs.spaced_queries)
        self._hand_on(self._spaced)
        newest = (self._next - 1) % self._size
        return self._spaced.with_newest(self._queries[:, :, newest, None], self._positions_from(0))

    def statistics(self) -> QueryStatistics | None:
        """Sums over every query so far; None if they were not asked for."""
        if self._sums is None or self._queries is None:
            return None
        self._hand_on(self._sums)
        return self._sums.total()

    def fresh(self) -> "QueryMemory":
        """An empty memory with the same settings."""
        return QueryMemory(self._needs, self._rotary, self._shared)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation (reorder, repeat, select) to everything remembered."""
        if self._queries is not None:
            self._queries = function(self._queries)
            positions = function(self._positions_from(0))
            self._positions, self._num_positions = deque([positions]), positions.shape[1]
        for taker in self._takers:
            taker.map_rows(function)

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

    def _log(self, positions: Tensor) -> None:
        self._positions.append(positions)
        self._num_positions += positions.shape[1]
        while self._num_positions - self._positions[0].shape[1] >= self._size:
            self._num_positions -= self._positions.popleft().shape[1]

    def _positions_from(self, start: int) -> Tensor:
        """`[B, R]` positions of the ring's entries, -1 where it has none yet; the oldest stands in column `start`."""
        return self._shared(_newest_positions, self._size, start, *self._positions)

    def _hand_on(self, taker: "_SpacedQueries | _Sums") -> None:
        """Give the ring's entries that wait for it."""
        if not taker.waiting:
            return
        positions = self._positions_from(self._next)
        if taker is self._spaced:
            # Those that it has already go where they are: cheaper than to pick the others.
            taker.add(self._queries, positions)
        else:
            waiting = torch.arange(self._next - taker.waiting, self._next, device=positions.device) % self._size
            taker.add(self._queries[:, :, waiting], positions[:, waiting])
        taker.waiting = 0


class _SpacedQueries:
    """The newest queries whose positions are on the grid of `QueryWindow.spaced`, each at a place that its position names.

    waiting: newest entries of the ring that were not handed on yet.
    """

    def __init__(self, tokens: int, step: int, shared: SharedResults):
        self.waiting = 0
        self._tokens = tokens
        self._step = step
        self._shared = shared
        self._count = num_spaced(step, tokens)
        # One place more, for what is not kept: to write it there is cheaper than to pick the rest.
        self._queries: Tensor | None = None
        self._positions: Tensor | None = None

    def add(self, query: Tensor, positions: Tensor) -> None:
        if self._queries is None:
            batch, heads, _, dim = query.shape
            self._queries = query.new_zeros(batch, heads, self._count + 1, dim)
        rows, self._positions = self._shared(
            _placed, self._positions, positions, self._step, query.shape[1], self._count
        )
        if self._queries.is_inference() and not torch.is_inference_mode_enabled():
            self._queries = self._queries.clone()
        # What was shown is a copy, so nothing that others see changes.
        _write(self._queries, rows, query)

    def with_newest(self, query: Tensor, positions: Tensor) -> QueryWindow:
        """What is held, no older than `tokens`, and the newest query, whose position is the last of `positions`."""
        rows, places = self._shared(
            _placed_newest, self._positions, positions, self._step, query.shape[1], self._tokens
        )
        rotated = self._queries.clone()
        _write(rotated, rows, query)
        return QueryWindow(rotated[:, :, : self._count], places)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._queries is not None:
            self._queries, self._positions = function(self._queries), function(self._positions)


def _on_device(positions: Tensor, device: torch.device) -> Tensor:
    return positions.to(device)


def _all_but_last(positions: Tensor, count: int) -> Tensor:
    return positions[:, :-count]


def _newest_positions(size: int, start: int, *positions: Tensor) -> Tensor:
    """`[B, size]` the last columns of all together, -1 before the first, rolled so that the oldest stands in column `start`."""
    newest = torch.cat(positions, dim=1)[:, -size:]
    return torch.nn.functional.pad(newest, (size - newest.shape[1], 0), value=-1).roll(start, dims=1)


def _placed(held: Tensor | None, positions: Tensor, step: int, heads: int, count: int) -> tuple[Tensor, Tensor]:
    """Rows (see `_rows_of_heads`) of the place of each position, `count` if it is not kept; `[B, count + 1]` what places hold."""
    if held is None:
        held = positions.new_full((positions.shape[0], count + 1), -1)
    # A place is written once: by the newest of those that positions with gaps lead to it.
    fresh = positions > positions.amax(dim=1, keepdim=True) - count * step
    kept = on_grid(positions, step) & fresh
    place = torch.where(kept, (positions + 1) // step % count, count)
    return _rows_of_heads(place, heads, count + 1), held.scatter(1, place, positions)


def _placed_newest(held: Tensor, positions: Tensor, step: int, heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Rows where the last position stands, which is where the next one of the grid will; `[B, count]` what places hold."""
    count = held.shape[1] - 1
    newest = positions[:, -1:]
    place = torch.where(newest >= 0, (newest + step) // step % count, count)
    held = held.masked_fill(held <= newest - tokens, -1).scatter(1, place, newest)
    return _rows_of_heads(place, heads, count + 1), held[:, :count]


def _rows_of_heads(place: Tensor, heads: int, places: int) -> Tensor:
    """`[B, N]` places as rows of `[B * Q * places, D]`, for N entries of each of Q heads: whole rows move fastest."""
    first = torch.arange(0, place.shape[0] * heads * places, places, device=place.device)
    return (place[:, None] + first.view(-1, heads, 1)).flatten()


def _write(held: Tensor, rows: Tensor, query: Tensor) -> None:
    """Puts the queries `[B, Q, N, D]` into `rows` of `[B, Q, places, D]`."""
    held.view(-1, held.shape[-1]).index_copy_(0, rows, query.reshape(-1, query.shape[-1]))


class _Sums:
    """Running sums over queries before RoPE.

    waiting: newest entries of the ring that were not handed on yet.
    """

    def __init__(self, rotary: Rotary):
        self.waiting = 0
        self._rotary = rotary
        self._sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, query: Tensor, positions: Tensor) -> None:
        counted = positions >= _SKIPPED_FIRST_TOKENS
        plain = self._rotary.all_planes(self._rotary.unrotate(query.float(), positions.clamp(min=0)))
        plain = torch.where(counted[:, None, :, None], plain, 0)
        modulus = plain.abs()
        new = (counted.sum(1), plain.sum(2), modulus.sum(2), modulus.square().sum(2))
        self._sums = new if self._sums is None else tuple(old + add for old, add in zip(self._sums, new))

    def total(self) -> QueryStatistics:
        return QueryStatistics(*self._sums)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._sums is not None:
            self._sums = tuple(function(tensor) for tensor in self._sums)
