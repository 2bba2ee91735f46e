"""Mass segments with quotas, from window evidence to integers (AMS, arXiv 2605.23200); plain torch.

Nothing here reads a value back: shapes depend on shapes and rules only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvstitch.kernels.segment_quota.mass import mix_mass
from kvstitch.kernels.segment_quota.quotas import public_quotas, water_fill
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.kernels.segment_quota.segments import fixed_edges, mass_edges


class SegmentPlan(NamedTuple):
    """Segments and quotas of every head.

    edges: int64 `[B, H, R + 1]` ascending from 0 to the number of valid slots, counting valid slots only; unused ones
        stand at the end and equal the last.
    slot_edges: int64 `[B, H, R + 1]` the same edges as slots of the cache, empty slots included; the last is T.
    lengths: float64 `[B, H, R]` valid slots of each segment, 0 for unused ones.
    masses: float64 `[B, H, R]` share of the mass.
    quotas: int64 `[B, H, R]` slots that each segment keeps, protected ones included; they sum to min(keep, valid).
    credit: `[B, H, T]` history after this event, in the rules' dtype.
    num_first: `[B, H, 1]` int64 protected first slots.
    first_recent: `[B, H, 1]` int64 valid slots before the protected recent ones.
    """

    edges: Tensor
    slot_edges: Tensor
    lengths: Tensor
    masses: Tensor
    quotas: Tensor
    credit: Tensor
    num_first: Tensor
    first_recent: Tensor


def segment_plan_reference(
    usage: Tensor,
    credit: Tensor | None,
    keep: Tensor,
    least_keep: int,
    valid: Tensor | None,
    rules: SegmentRules,
) -> SegmentPlan:
    """Mass, segments and quotas of one event.

    Args:
        usage: `[B, H, T]` window evidence, pooled and padded, not normalised.
        credit: `[B, H, T' <= T]` from the previous event, or None.
        keep: `[B]` int64 slots per head.
        least_keep: lower bound of `keep`, known on the host; spares the work for floors that cannot fail.
        valid: `[B, H, T]` bool, or None if no slot is empty.
        rules: numbers and switches.
    """
    rank = None if valid is None else valid.cumsum(dim=-1)
    mass, updated = mix_mass(usage, credit, valid, rules)
    prefix = mass.cumsum(dim=-1, dtype=torch.float64)
    if rules.segment_tokens is None:
        edges = mass_edges(prefix, rank, rules)
    else:
        edges = fixed_edges(prefix, rank, rules.segment_tokens)
    slot_edges = edges if rank is None else _slot_edges(edges, rank)
    count = edges[..., -1:]
    keep = torch.minimum(keep[:, None, None], count)
    num_first, first_recent = protected_limits(keep, count, rules.num_sinks, rules.num_recent, rules.must_priority)
    lengths, must, masses = _per_segment(edges, slot_edges, prefix, num_first, first_recent)
    may_fail = least_keep < lengths.shape[-1] * rules.min_keep_tokens + rules.num_sinks + rules.num_recent
    quotas = _quotas(lengths, masses, must, keep, may_fail, rules)
    return SegmentPlan(edges, slot_edges, lengths, masses, quotas.long(), updated, num_first, first_recent)


def protected_limits(
    keep: Tensor, count: Tensor, num_sinks: int, num_recent: int, priority: str
) -> tuple[Tensor, Tensor]:
    """How many first valid slots are protected, and before which valid slot the protected recent ones begin.

    Args:
        keep: int64 budget, broadcast with `count`; at most `count`.
        count: int64 valid slots.
        priority: "sink" or "suffix": who goes without when the budget is too small for both.
    """
    if priority == "sink":
        sinks = keep.clamp(max=num_sinks)
        recent = (keep - sinks).clamp(max=num_recent)
    else:
        recent = keep.clamp(max=num_recent)
        sinks = (keep - recent).clamp(max=num_sinks)
    return sinks, torch.maximum(sinks, count - recent)


def _slot_edges(edges: Tensor, rank: Tensor) -> Tensor:
    """The slot after the `edges`-th valid one; the last segment also takes the empty slots after it."""
    after = torch.searchsorted(rank, edges) + 1
    after = torch.where(edges > 0, after, 0)
    after[..., -1] = rank.shape[-1]
    return after.clamp_(max=rank.shape[-1])


def _per_segment(
    edges: Tensor, slot_edges: Tensor, prefix: Tensor, num_first: Tensor, first_recent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, protected slots and masses of the segments, float64: each a difference along the edges."""
    running = torch.nn.functional.pad(prefix, (1, 0)).gather(-1, slot_edges)
    protected = torch.minimum(edges, num_first) + torch.maximum(edges, first_recent)
    # Slot counts are exact in float64, so one difference serves all three.
    stacked = torch.stack((edges.double(), protected.double(), running))
    lengths, must, masses = (stacked[..., 1:] - stacked[..., :-1]).unbind()
    return lengths, must, masses


def _quotas(lengths: Tensor, masses: Tensor, must: Tensor, keep: Tensor, may_fail: bool, rules: SegmentRules) -> Tensor:
    counted = must if rules.must_keep == "first_counted" else torch.zeros_like(must)
    set_aside = must if rules.must_keep == "first_separate" else None
    if set_aside is not None:
        lengths, keep = lengths - set_aside, keep - set_aside.sum(dim=-1, keepdim=True)
        may_fail = True
    if rules.quota == "reference":
        quotas = public_quotas(lengths, masses, counted, keep, rules.min_keep_tokens)
    else:
        weights = lengths if rules.quota == "length" else masses
        quotas = water_fill(lengths, weights, counted, keep, rules.min_keep_tokens, may_fail)
    return quotas if set_aside is None else quotas + set_aside
