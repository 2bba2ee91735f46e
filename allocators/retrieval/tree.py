"""A tree over regions: the best are found from coarse to fine, without a look at most of them."""

from collections.abc import Callable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.level import Level
from kvstitch.allocators.retrieval.parents import BRANCHING
from kvstitch.allocators.retrieval.scoring import combined
from kvstitch.allocators.retrieval.store import RegionStore
from kvstitch.kernels.common.ranges import expand_ranges, unit_steps
from kvstitch.kernels.common.rows import gather_rows

# Children are listed for so many times the tokens that are wanted: a parent's mean says less than a child's.
_OVERSAMPLED = 4


class RegionTree:
    """Levels above the regions; a step lists a bounded number of nodes on each, and looks at all of the top's.

    Regions that open later get parents, `BRANCHING` neighbours together, and so do those; what waits for neighbours is a
    candidate at every step. With `narrow_top` the tree grows a level whenever so many wait at its top, which has at most
    about two times `BRANCHING` nodes then: a step reads O(D log C) of C regions. Without, the number of levels is fixed, and a
    step reads the top's C / BRANCHING ** levels nodes.

    No row depends on others: how many nodes are listed is its own affair, and what opens later opens in all of them.

    Args:
        store: the regions, whose columns are sorted by parent; those of new tokens come at the end.
        parents: as `sorted_by_parent` gives them. Levels above one of at most `BRANCHING` nodes are set aside with
            `narrow_top`: they would narrow nothing.
        wanted: `[B]` tokens that a selection of each row lists.
        new_tokens: of a region that opens later.
        narrow_top: see above.
    """

    def __init__(
        self,
        store: RegionStore,
        parents: list[Int64[Tensor, "B U _"]],
        wanted: Int64[Tensor, "B"],
        new_tokens: int,
        narrow_top: bool = False,
    ):
        self._narrow_top = narrow_top
        # Parents of the top's nodes, of those, …: not searched, but there when the tree grows or is built again.
        self._aside, self._num_last = list(parents), int(parents[-1].max()) + 1
        self._num_parented = store.num
        self._levels: list[Level] = []
        while self._aside and not (narrow_top and self._levels and self._levels[-1].num <= BRANCHING):
            self._raise(store)
        self._limits = self._leaves(store, wanted, new_tokens)
        self._most_leaves = int(self._limits.max())
        self._steps: dict[int, Tensor] = {}

    def _leaves(self, store: RegionStore, wanted: Tensor, new_tokens: int) -> Int64[Tensor, "B U 1"]:
        """Regions that a selection lists: as many as could hold what is wanted."""
        regions = (store.counts > 0).sum(dim=-1, keepdim=True)
        mean_tokens = (store.counts.sum(dim=-1, keepdim=True) // regions.clamp(min=1)).clamp(1, new_tokens)
        return -(-_OVERSAMPLED * wanted[:, None, None] // mean_tokens)

    # -- searching --------------------------------------------------------------------------------------------------

    def candidates(
        self, store: RegionStore, rows: Float32[Tensor, "B S N E"], combine: str, scaling: float | int
    ) -> Int64[Tensor, "B S X"]:
        """Columns of the regions below the best nodes, -1 where there are fewer; those of the best first."""
        ids = self._numbers(0, self._levels[-1].num, rows)
        for up, level in reversed(list(enumerate(self._levels))):
            ratings = combined(score_columns(level.rows, level.bias, ids, rows), combine, scaling)
            ids = ids.gather(-1, ratings.argsort(dim=-1, descending=True))
            waiting = self._numbers(*self._waiting(up, store), rows)
            ids = torch.cat((self._children(level, ids, up), waiting), dim=-1)
        return ids

    def _children(self, level: Level, ids: Tensor, up: int) -> Tensor:
        width, group = self._width(up), ids.shape[1] // level.first.shape[1]
        limits = self._limits // BRANCHING**up + BRANCHING
        first, count, limit = (x.repeat_interleave(group, dim=1) for x in (level.first, level.count, limits))
        at = ids.clamp(min=0)
        first, count = first.gather(-1, at), count.gather(-1, at).masked_fill(ids < 0, 0)
        ends = count.cumsum(-1)
        if up not in self._steps or len(self._steps[up]) != width + 1:
            self._steps[up] = unit_steps(width, ids.device)
        children = expand_ranges(first, count, ends, self._steps[up])[..., :width]
        listed = torch.arange(width, device=ids.device) < torch.minimum(ends[..., -1:], limit)
        return children.masked_fill(~listed, -1)

    def _numbers(self, first: int, last: int, rows: Tensor) -> Int64[Tensor, "B S N"]:
        return torch.arange(first, last, device=rows.device).expand(*rows.shape[:2], -1)

    def _width(self, up: int) -> int:
        """Columns for the nodes listed `up` levels above the regions: as many as could hold the leaves, and a few more."""
        parented = self._levels[up - 1].parented if up else self._num_parented
        return min(parented, self._most_leaves // BRANCHING**up + BRANCHING)

    def _waiting(self, up: int, store: RegionStore) -> tuple[int, int]:
        """First and last, exclusive, of what has no parent yet."""
        if up == 0:
            return self._num_parented, store.num
        return self._levels[up - 1].parented, self._levels[up - 1].num

    def num_rows(self, store: RegionStore) -> int:
        """Vectors that a selection reads at a step, of the row that reads most."""
        rows = self._levels[-1].num
        for up in range(len(self._levels)):
            first, last = self._waiting(up, store)
            rows += self._width(up) + last - first
        return rows

    # -- growing ----------------------------------------------------------------------------------------------------

    def take_in(self, store: RegionStore) -> None:
        """Gives parents to regions that opened since and that are complete; each costs O(D log C), spread over 16 of them.

        No host sync: which columns opened is known.
        """
        # The last one may still gain members.
        while store.num - self._num_parented > BRANCHING:
            children = slice(self._num_parented, self._num_parented + BRANCHING)
            self._levels[0].append(
                store.vector_rows[:, :, children], store.counts[..., children].long(), children.start
            )
            self._num_parented = children.stop
            for lower, upper in zip(self._levels, self._levels[1:]):
                self._adopt(lower, upper)
            top = self._levels[-1]
            if self._narrow_top and top.num - top.parented >= BRANCHING:
                self._raise(store)
                self._adopt(top, self._levels[-1])

    @staticmethod
    def _adopt(lower: Level, upper: Level) -> None:
        if lower.num - lower.parented >= BRANCHING:
            children = slice(lower.parented, lower.parented + BRANCHING)
            upper.append(lower.rows[:, :, children], lower.tokens[..., children], children.start)
            lower.parented = children.stop

    def _raise(self, store: RegionStore) -> None:
        """A level above the top, over those of the top's nodes that were there when it was made."""
        if not self._levels:
            rows, tokens = store.vector_rows[:, :, : store.num], store.counts.long()
        else:
            top = self._levels[-1]
            rows, tokens = top.rows[:, :, : top.parented], top.tokens[..., : top.parented]
        if self._aside:
            parent = self._aside.pop(0)
            num = self._aside[0].shape[-1] if self._aside else self._num_last
        else:
            # Few enough for one root.
            parent, num = torch.where(tokens > 0, 0, -1), 1
        self._levels.append(Level.above(rows, tokens, parent, num))

    def parents_of(self, regions: Int64[Tensor, "B U T"]) -> list[Int64[Tensor, "B U T"]]:
        """The node above each region on each level, nearest first; -1 where there is none."""
        found, child = [], regions
        for level in self._levels:
            child = level.parents_of(child)
            found.append(child)
        for parent in self._aside:
            known = (child >= 0) & (child < parent.shape[-1])
            child = torch.where(known, parent.gather(-1, child.clamp(0, parent.shape[-1] - 1)), -1)
            found.append(child)
        return found

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._limits, self._aside = function(self._limits), [function(parent) for parent in self._aside]
        for level in self._levels:
            level.map_rows(function)

    @property
    def stored_bytes(self) -> int:
        beside = sum(x.untyped_storage().nbytes() for x in (self._limits, *self._aside, *self._steps.values()))
        return beside + sum(level.stored_bytes for level in self._levels)


def score_columns(
    vectors: Float32[Tensor, "B U C E"],
    bias: Float32[Tensor, "B U C"],
    ids: Int64[Tensor, "B S X"],
    rows: Float32[Tensor, "B S N E"],
) -> Float32[Tensor, "B S N X"]:
    """Products with some columns only; -inf where the id is -1 or the column is empty."""
    gathered = gather_rows((vectors,), ids)[0]
    own_bias = bias.repeat_interleave(ids.shape[1] // bias.shape[1], dim=1).gather(-1, ids.clamp(min=0))
    return rows @ gathered.transpose(2, 3) + own_bias.masked_fill_(ids < 0, -torch.inf)[:, :, None]
