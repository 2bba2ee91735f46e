"""Exact q.k where it is worth its reads: inside the region that does not fit, or over a shortlist."""

import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.base import DecodeStep
from kvstitch.kernels.common.rows import gather_rows


def logits_of(step: DecodeStep, slots: Int64[Tensor, "B U M"], scaling: float | int) -> Float32[Tensor, "B U N M"]:
    """Scaled q.k of every query head of a unit with the unit's slots; N = G for units that are kv heads, else 1."""
    batch, units, count = slots.shape
    keys = gather_rows((step.keys,), slots)[0].float().flatten(0, 1)
    rows = step.query.view(batch * units, -1, step.query.shape[-1]).float()
    return torch.bmm(rows, keys.transpose(1, 2)).view(batch, units, -1, count) * scaling


def best_of_shortlist(
    step: DecodeStep,
    slots: Int64[Tensor, "B U M"],
    valid: Bool[Tensor, "B U M"] | None,
    count: int,
    scaling: float | int,
) -> Int64[Tensor, "B U W"]:
    """The `count` slots of a shortlist with the largest weight, averaged over the heads of a unit; best first.

    Slots that are not valid (None: all are) come last.
    """
    logits = logits_of(step, slots, scaling)
    if valid is not None:
        logits = logits.masked_fill(~valid[:, :, None], -torch.inf)
    weights = logits.softmax(dim=-1).mean(dim=2)
    if valid is not None:
        # A unit without any valid slot has NaN weights.
        weights = torch.where(valid, weights, -1.0)
    return slots.gather(-1, weights.topk(count, dim=-1).indices)


def rank_range(
    step: DecodeStep,
    slots: Int64[Tensor, "B U W1"],
    starts: Int64[Tensor, "B U 1"],
    sizes: Int64[Tensor, "B U 1"],
    first_column: Int64[Tensor, "B U 1"],
    room: Int64[Tensor, "B U 1"],
    widest: int,
    order: Int32[Tensor, "B U T"] | None,
) -> None:
    """Overwrites, in place, the columns of a range that is read in part with its members of the largest mean q.k.

    Args:
        slots: the last column takes what goes nowhere.
        starts, sizes: the range; 0 members where nothing is cut.
        first_column: column of `slots` where the range begins.
        room: how many of its members are read.
        widest: the largest size that any range has.
        order: slot of each place, if ranges are places in a list.
    """
    place = torch.arange(widest, device=slots.device)
    inside = place < sizes
    members = torch.where(inside, starts + place, 0)
    if order is not None:
        members = order.gather(-1, members).long()
    scores = logits_of(step, members, 1.0).mean(dim=2).masked_fill_(~inside, -torch.inf)
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices
    columns = torch.where(place < torch.minimum(room, sizes), first_column + place, slots.shape[-1] - 1)
    slots.scatter_(-1, columns, members.gather(-1, ranked))
