"""A tree over regions: the best are found from coarse to fine, without a look at most of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.layout import without_gaps
from kvstitch.allocators.retrieval.scoring import combined
from kvstitch.allocators.retrieval.store import RegionStore
from kvstitch.kernels.common.ranges import expand_ranges, unit_steps
from kvstitch.kernels.common.rows import gather_rows

# Regions or nodes that share a parent, about.
BRANCHING = 16
_UNKNOWN, _NOWHERE = 2**40, 2**41
# Children are listed for so many times the tokens that are wanted: a parent's mean says less than a child's.
_OVERSAMPLED = 4


class Level(NamedTuple):
    """Nodes of one level; the children of a node are neighbours on the next finer one.

    Args:
        rows: `[B, U, P, E]` mean of the representatives of a node's tokens.
        bias: `[B, U, P]` 0, or -inf where there is no node.
        first: `[B, U, P]` its first child.
        count: `[B, U, P]` its children.
    """

    rows: Float32[Tensor, "B U P E"]
    bias: Float32[Tensor, "B U P"]
    first: Int64[Tensor, "B U P"]
    count: Int64[Tensor, "B U P"]


class RegionTree:
    """Levels from the coarsest to the one above the regions; a step reads O(D log C) of C regions.

    Regions that open later are children of nobody and always candidates, until the index is built again.

    Args:
        levels: coarsest first.
        store: the regions, whose columns are sorted by parent.
        wanted: tokens that a selection lists.
    """

    def __init__(self, levels: list[Level], store: RegionStore, wanted: int):
        self._levels = levels
        self._num_leaves = store.num
        mean_tokens = max(int(store.counts.sum(dim=-1).amin()) // store.num, 1)
        leaves = min(store.num, -(-_OVERSAMPLED * wanted // mean_tokens))
        counts = [level.count.shape[-1] for level in levels[1:]] + [store.num]
        # Each level lists as many nodes as could hold the leaves, and a few more.
        needed = [min(count, leaves // BRANCHING**up + BRANCHING) for up, count in enumerate(reversed(counts))]
        self._widths = list(reversed(needed))
        self._steps: dict[int, Tensor] = {}

    def candidates(
        self, store: RegionStore, rows: Float32[Tensor, "B S N E"], combine: str, scaling: float | int
    ) -> Int64[Tensor, "B S X"]:
        """Columns of the regions below the best nodes, -1 where there are fewer; those of the best first."""
        top = self._levels[0]
        ids = torch.arange(top.count.shape[-1], device=rows.device).expand(*rows.shape[:2], -1)
        for level, width in zip(self._levels, self._widths):
            ratings = combined(score_columns(level.rows, level.bias, ids, rows), combine, scaling)
            ids = ids.gather(-1, ratings.argsort(dim=-1, descending=True))
            ids = self._children(level, ids, width)
        grown = torch.arange(self._num_leaves, store.num, device=rows.device).expand(*rows.shape[:2], -1)
        return torch.cat((ids, grown), dim=-1)

    def _children(self, level: Level, ids: Tensor, width: int) -> Tensor:
        batch, selections = ids.shape[:2]
        group = selections // level.first.shape[1]
        first, count = (
            x.repeat_interleave(group, dim=1).gather(-1, ids.clamp(min=0)) for x in (level.first, level.count)
        )
        count = count.masked_fill(ids < 0, 0)
        ends = count.cumsum(-1)
        if width not in self._steps or self._steps[width].shape[:2] != ids.shape[:2]:
            self._steps[width] = unit_steps(batch, selections, width, ids.device)
        children = expand_ranges(first, count, ends, self._steps[width])[..., :width]
        return children.masked_fill(torch.arange(width, device=ids.device) >= ends[..., -1:], -1)

    @property
    def num_rows(self) -> int:
        """Vectors that a step reads per unit, those of regions that opened later left out."""
        return self._levels[0].count.shape[-1] + sum(self._widths)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._levels = [Level(*map(function, level)) for level in self._levels]

    @property
    def stored_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for level in self._levels for x in level)


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


def build_levels(store: RegionStore, parents: list[Int64[Tensor, "B U _"]]) -> list[Level]:
    """Levels from the parent of each region, then the parent of each parent, …; columns must be sorted by all of them.

    Args:
        store: regions; columns without a parent have -1 and come last.
        parents: nearest first; numbers from 0, ascending along the columns.
    """
    levels = []
    sums = store.vectors.transpose(2, 3) * store.counts[..., None]
    tokens = store.counts
    for parent in parents:
        num = int(parent.max()) + 1
        index = torch.where(parent < 0, num, parent)
        shape = (*parent.shape[:2], num + 1)
        count = parent.new_zeros(shape).scatter_add_(-1, index, torch.ones_like(index))[..., :num]
        held = parent.new_zeros(shape).scatter_add_(-1, index, tokens)[..., :num]
        total = sums.new_zeros(*shape, sums.shape[-1])
        total.scatter_add_(2, index[..., None].expand(-1, -1, -1, sums.shape[-1]), sums)
        sums, tokens = total[:, :, :num], held
        bias = torch.zeros(held.shape, device=held.device).masked_fill_(held == 0, -torch.inf)
        levels.append(Level(sums / held.clamp(min=1)[..., None], bias, count.cumsum(-1) - count, count))
    return levels[::-1]


def sorted_by_parent(
    labels: Int64[Tensor, "B U T"], coarse: list[Int64[Tensor, "B U T"]]
) -> tuple[Int64[Tensor, "B U T"], list[Int64[Tensor, "B U _"]]]:
    """Regions renumbered so that those of a parent are neighbours; the parent of each region, of each parent, ….

    A region belongs to the coarse region of its members (the lowest, should they differ); regions without one are put
    together as they come, `BRANCHING` a parent.

    Args:
        labels: region of each slot, -1 outside.
        coarse: coarser regions of each slot, nearest first, each made of whole ones of the level before; -1 where there is
            none.
    """
    labels, _ = without_gaps(labels)
    if not coarse:
        return labels, []
    num = int(labels.max()) + 1
    ancestors = [_ancestor(labels, level, num, BRANCHING ** (up + 1)) for up, level in enumerate(coarse)]
    order = torch.arange(num, device=labels.device).expand(*labels.shape[:2], num)
    for ancestor in ancestors:
        order = order.gather(-1, ancestor.gather(-1, order).sort(dim=-1, stable=True).indices)
    number = torch.empty_like(order).scatter_(-1, order, torch.arange(num, device=labels.device).expand_as(order))
    renumbered = torch.where(labels < 0, -1, number.gather(-1, labels.clamp(min=0)))
    nodes = [torch.arange(num, device=labels.device).expand_as(order)]
    for up in range(len(ancestors)):
        # A node begins where it, or one above it, is another than the column's before.
        changes = torch.zeros_like(order, dtype=torch.bool)
        for ancestor in ancestors[up:]:
            own = ancestor.gather(-1, order)
            changes[..., 1:] |= own[..., 1:] != own[..., :-1]
        nodes.append(changes.cumsum(-1).masked_fill(ancestors[0].gather(-1, order) == _NOWHERE, -1))
    return renumbered, [_parents(child, parent) for child, parent in zip(nodes, nodes[1:])]


def _ancestor(labels: Tensor, coarse: Tensor, num: int, together: int) -> Int64[Tensor, "B U C"]:
    """The coarse region of each region, a number of its own for each group of those without, `_NOWHERE` for unused."""
    shape = (*labels.shape[:2], num + 1)
    own = torch.where(coarse < 0, _UNKNOWN, coarse)
    lowest = labels.new_full(shape, _NOWHERE).scatter_reduce_(-1, labels + 1, own, "amin")[..., 1:]
    unknown = lowest == _UNKNOWN
    return torch.where(unknown, _UNKNOWN + (unknown.cumsum(-1) - 1) // together, lowest)


def _parents(child: Int64[Tensor, "B U C"], parent: Int64[Tensor, "B U C"]) -> Int64[Tensor, "B U N"]:
    """Parent of each node, from the node and the parent of each column; -1 for numbers that no node has."""
    num = int(child.max()) + 1
    out = child.new_full((*child.shape[:2], num + 1), -1)
    return out.scatter_(-1, torch.where(child < 0, num, child), parent)[..., :num]
