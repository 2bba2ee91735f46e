"""Who is above whom in a tree over regions: columns in an order in which the children of a node are neighbours."""

from itertools import zip_longest

import torch
from jaxtyping import Int64
from torch import Tensor

from kvstitch.allocators.retrieval.layout import without_gaps

# Regions or nodes that share a parent, about; as many as that are looked at one by one.
BRANCHING = 16
_UNKNOWN, _NOWHERE = 2**40, 2**41


def sorted_by_parent(
    labels: Int64[Tensor, "B U T"], coarse: list[Int64[Tensor, "B U T"]], narrow_top: bool = False
) -> tuple[Int64[Tensor, "B U T"], list[Int64[Tensor, "B U _"]]]:
    """Regions renumbered so that those of a parent are neighbours; the parent of each region, of each parent, ….

    A region belongs to the coarse region of its members (the lowest, should they differ); regions without one are put
    together as they come, `BRANCHING` a parent.

    Args:
        labels: region of each slot, -1 outside.
        coarse: coarser regions of each slot, nearest first, each made of whole ones of the level before; -1 where there is
            none.
        narrow_top: nodes without a parent are put together as they come, too, until `BRANCHING` or fewer are left.
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
    unused = ancestors[0].gather(-1, order) == _NOWHERE
    for up in range(len(ancestors)):
        # A node begins where it, or one above it, is another than the column's before.
        changes = torch.zeros_like(order, dtype=torch.bool)
        for ancestor in ancestors[up:]:
            own = ancestor.gather(-1, order)
            changes[..., 1:] |= own[..., 1:] != own[..., :-1]
        nodes.append(changes.cumsum(-1).masked_fill(unused, -1))
    while narrow_top and int(nodes[-1].max()) >= BRANCHING:
        nodes.append((nodes[-1] // BRANCHING).masked_fill(unused, -1))
    return renumbered, [_parents(child, parent) for child, parent in zip(nodes, nodes[1:])]


def joined(old: list[Int64[Tensor, "B U T"]], new: list[Int64[Tensor, "B U T"]]) -> list[Int64[Tensor, "B U T"]]:
    """Coarser regions of all slots from those known before and those of a new graph, which knows its own tokens best.

    Args:
        old, new: nearest first; -1 where there is none.
    """
    levels = []
    for before, found in zip_longest(old, new):
        if before is None or found is None:
            levels.append(found if before is None else before)
        else:
            # Behind the old ones, as their tokens came later.
            first = before.amax(dim=-1, keepdim=True) + 1
            levels.append(torch.where(found < 0, before, found + first))
    return levels


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
