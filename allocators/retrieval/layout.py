"""Storage order in which the members of a region are neighbours."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

_LABEL_SHIFT = 32
_OUTSIDE = 2**60


class Layout(NamedTuple):
    """Where the regions lie once the storage, or a list of slots, has been put in `order`.

    Args:
        order: `[B, U, T]` old slot of each new slot: empty slots, sinks by position, regions one after another, then
            what is not placed, unmoved.
        labels: `[B, U, T]` region of each old slot, numbered without gaps, -1 outside.
        starts: `[B, U, R]` first new slot of each region.
        sizes: `[B, U, R]` its placed members; 0 for regions whose members are all new, or of other heads.
        numbers: `[B, U, L]` number that each label was given; -1 for labels that no slot has.
    """

    order: Tensor
    labels: Tensor
    starts: Tensor
    sizes: Tensor
    numbers: Tensor


def lay_out(
    labels: Int64[Tensor, "B U T"],
    positions: Int64[Tensor, "B U T"],
    sinks: Bool[Tensor, "B U T"],
    placed: Bool[Tensor, "B U T"],
    boundary: int,
    scores: Float32[Tensor, "B U T"] | None = None,
) -> Layout:
    """Regions as contiguous ranges; the members that are read when not all of a region fits come first.

    Args:
        labels: region of each slot, -1 outside; any integers from 0, gaps allowed.
        positions: -1 on empty slots.
        sinks: slots that go to the front.
        placed: slots that go into their region's range.
        boundary: slots from here on stay where they are.
        scores: members stand from the highest to the lowest score; None: from the newest to the oldest.
    """
    labels, numbers = without_gaps(labels)
    slot = torch.arange(labels.shape[-1], device=labels.device)
    rank = -positions if scores is None else _rank_descending(scores)
    key = torch.where(placed, (labels << _LABEL_SHIFT) + rank, _OUTSIDE + slot)
    key = torch.where(sinks, positions - _OUTSIDE, key)
    empty = (positions < 0) & (slot < boundary)
    key = torch.where(empty, -2 * _OUTSIDE, key)
    order = key.sort(dim=-1, stable=True).indices
    num_regions = max(int(labels.max()) + 1, 1)
    sizes = labels.new_zeros(*labels.shape[:2], num_regions + 1)
    sizes = sizes.scatter_add_(-1, torch.where(placed, labels + 1, 0), torch.ones_like(labels))[..., 1:]
    base = (empty | sinks).sum(dim=-1, keepdim=True)
    return Layout(order, labels, base + sizes.cumsum(-1) - sizes, sizes, numbers)


def without_gaps(labels: Int64[Tensor, "B U T"]) -> tuple[Int64[Tensor, "B U T"], Int64[Tensor, "B U L"]]:
    """The same regions, numbered from 0 in each head in the same order (-1 stays), and the number of each label."""
    used = labels.new_zeros(*labels.shape[:2], int(labels.max()) + 2).scatter_(-1, labels + 1, 1)
    used[..., 0] = 0
    numbers = torch.where(used > 0, used.cumsum(-1) - 1, -1)
    return numbers.gather(-1, labels + 1), numbers[..., 1:]


def _rank_descending(scores: Tensor) -> Tensor:
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)
