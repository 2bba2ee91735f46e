"""What SegmentQuota and FixedSegments share: evidence, segments, quotas and credit of an event."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.evidence import MASS_PADS, POOL_EDGES, QUERY_POSITIONS, SINK_MASSES, Evidence
from kvstitch.allocators.limits import Limits
from kvstitch.allocators.options import check_choices, check_counts, check_fractions, check_switches
from kvstitch.allocators.selector import gather_state, unless_full
from kvstitch.kernels.segment_quota.api import segment_plan, segment_select
from kvstitch.kernels.segment_quota.reference import SegmentPlan
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.views import LayerView, Needs

_CHOICES = {
    "mass_pad": MASS_PADS,
    "pool_edges": POOL_EDGES,
    "sink_mass": SINK_MASSES,
    "query_positions": QUERY_POSITIONS,
    "must_keep": ("first_counted", "first_separate", "after"),
    "must_priority": ("sink", "suffix"),
    "credit_init": ("zero", "mass"),
    "credit_scale": ("mass", "usage"),
    "batch": ("per_sample", "batch_mean"),
    "mass_dtype": ("float64", "float32"),
}
# Layers are stacked up to this many slots: beyond, arithmetic costs more than calls, and memory would grow.
_STACKED_SLOTS = 2**20
_COUNTS = {
    "min_keep_tokens": 0,
    "window_tokens": 1,
    "window_step": 1,
    "pool_kernel": 1,
    "num_sinks": 0,
    "num_recent": 0,
}


@dataclass(frozen=True)
class SegmentSelection:
    """What one event keeps, and the segments that it was shared out over.

    Args:
        slots: `[B, H, K]` ascending, -1 after the last one; K is the largest budget, or T if that is less.
        credit: `[B, H, K]` history of the kept slots, for the next event; 0 where `slots` is -1.
        boundaries: `[B, H, R + 1]` edges of the segments, counting valid slots only: 0, then each segment's end, then
            -1. R is fixed by T and the options.
        quotas: `[B, H, R]` slots that each segment was given, then -1. With `must_keep="after"` the protected slots
            may have taken some of them since.
        masses: `[B, H, R]` share of each segment in the mass, then 0.
        floors_missed: `[B, H]` segments whose quota is below their floor, because the budget could not pay all floors.
    """

    slots: Int64[Tensor, "B H K"]
    credit: Float32[Tensor, "B H K"]
    boundaries: Int64[Tensor, "B H R1"]
    quotas: Int64[Tensor, "B H R"]
    masses: Float32[Tensor, "B H R"]
    floors_missed: Int64[Tensor, "B H"]


class MassSegments(EvictingAllocator):
    """Base of the allocators that give quotas to segments by window mass and credit; see `SegmentQuota`."""

    @property
    def needs(self) -> Needs:
        turned = self.query_positions == "current"
        if self.window_step == 1:
            return Needs(queries=self.window_tokens, rotary=turned)
        return Needs(spaced_queries=self.window_tokens, query_step=self.window_step, rotary=turned)

    def select(
        self,
        scores: Float32[Tensor, "B H T"],
        usage: Float32[Tensor, "B H T"],
        keep: int | Int64[Tensor, "B"],
        credit: Float32[Tensor, "B H C"] | None = None,
        valid: Bool[Tensor, "B H T"] | None = None,
    ) -> SegmentSelection:
        """Segments, quotas and the slots to keep.

        Args:
            scores: higher = keep; NaN never wins.
            usage: window evidence after pooling and padding, before normalisation.
            keep: slots per kv head, protected ones included; one for all rows or one a row.
            credit: the previous event's, in the order of the slots; shorter than T where slots are new, which start at
                zero (or at their mass, `credit_init="mass"`).
            valid: False on empty slots, which may stand anywhere: a head gets what it would get without them.

        Returns: a head with no more valid slots than its budget keeps all of them, and its credit as it was.
        Raises: ValueError if shapes disagree; TypeError if a dtype is another.
        """
        _check_shapes(scores, usage, credit, valid)
        limits = Limits.of(self._target(keep, scores.shape[-1]), scores.shape[0], scores.device)
        if credit is not None:
            # As usage: what is not a number is no evidence.
            credit = credit.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return self._select(scores, usage, limits, credit, valid)

    def allocate(
        self,
        view: LayerView,
        scores: Float32[Tensor, "B H T"],
        keep: Int64[Tensor, "B"],
        state: dict[str, Tensor],
    ) -> Selection:
        return self._allocate_stack([(view, scores, keep, state)])[0]

    def allocate_layers(
        self,
        views: Sequence[LayerView],
        scores: Sequence[Float32[Tensor, "..."]],
        keeps: Sequence[Int64[Tensor, "..."]],
        states: Sequence[dict[str, Tensor]],
    ) -> list[Selection]:
        """Stacks neighbouring layers of equal shape along the batch, unless its rows depend on each other."""
        coupled = self.mass_pad == "global_max" or self.batch == "batch_mean"
        together = 1 if coupled else max(1, _STACKED_SLOTS // max(layer.numel() for layer in scores))
        selections = []
        for _, alike in groupby(zip(views, scores, keeps, states), key=_shape_of_layer):
            alike = list(alike)
            for start in range(0, len(alike), together):
                selections += self._allocate_stack(alike[start : start + together])
        return selections

    def _allocate_stack(self, layers: list[tuple[LayerView, Tensor, Tensor, dict[str, Tensor]]]) -> list[Selection]:
        views, scores, keeps, states = zip(*layers)
        slots, device = scores[0].shape[-1], scores[0].device
        each = [Limits.of(self._target(keep, slots), len(keep), device) for keep in keeps]
        limits = Limits(min(x.least for x in each), max(x.most for x in each), torch.cat([x.rows for x in each]))
        valid = unless_full(torch.cat([view.valid for view in views]))
        usage = self._evidence.of_layers(views, valid, limits.rows)
        # Layers that are stacked have credit of one width, or none of them has.
        credit = torch.cat([state["credit"] for state in states]) if self.credit and "credit" in states[0] else None
        chosen = self._select(torch.cat(scores), usage, limits, credit, valid)
        return _unstack(chosen, [min(x.most, slots) for x in each], self.credit)

    def _select(
        self, scores: Tensor, usage: Tensor, limits: Limits, credit: Tensor | None, valid: Tensor | None
    ) -> SegmentSelection:
        slots = scores.shape[-1]
        plan = segment_plan(usage, credit, limits.rows, limits.least, valid, self._rules)
        kept = segment_select(
            scores,
            plan.slot_edges,
            plan.quotas,
            plan.num_first,
            plan.first_recent,
            valid,
            self.must_keep,
            min(limits.most, slots),
        )
        history = plan.credit.float()
        if limits.least >= slots or valid is not None or limits.least != limits.most:
            # Nothing is evicted where all valid slots fit, and history is left as it was.
            fits = plan.edges[..., -1:] <= limits.rows[:, None, None]
            history = torch.where(fits, _extended(credit, history), history)
        return _described(plan, kept, gather_state(history, kept), self.min_keep_tokens)

    def _target(self, keep: int | Tensor, slots: int) -> int | Tensor:
        """Slots that an event really keeps; all but SegmentQuota's `exact_target=False` keep what they are told."""
        return keep

    def _derive(self, segment_tokens: int | None, rules: dict[str, object]) -> None:
        """Checks the shared options and fixes what follows from them; called once, when the dataclass is built."""
        check_choices(self, _CHOICES)
        check_counts(self, _COUNTS)
        check_fractions(self, ("credit_decay", "credit_mix"))
        check_switches(self, ("credit",))
        if self.pool_kernel % 2 == 0:
            raise ValueError(
                f"pool_kernel must be odd, got {self.pool_kernel}; the nearest valid value is {self.pool_kernel + 1}"
            )
        if self.window_step > 1 and self.mass_pad != "visible_mean":
            raise ValueError(
                f"window_step={self.window_step} needs mass_pad='visible_mean': the others fill the whole window's slots, got "
                f"{self.mass_pad!r}; set window_step=1"
            )
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        shared = {field.name: own[field.name] for field in fields(SegmentRules) if field.name in own}
        object.__setattr__(self, "_rules", SegmentRules(**(rules | shared | {"segment_tokens": segment_tokens})))
        evidence = Evidence(**{field.name: own[field.name] for field in fields(Evidence)})
        object.__setattr__(self, "_evidence", evidence)


def _extended(credit: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if credit is None else F.pad(credit, (0, like.shape[-1] - credit.shape[-1]))


def _described(plan: SegmentPlan, slots: Tensor, credit: Tensor, floor: int) -> SegmentSelection:
    unused = plan.lengths == 0
    boundaries = plan.edges.masked_fill(F.pad(unused, (1, 0)), -1)
    missed = (plan.quotas < plan.lengths.clamp(max=floor)).sum(dim=-1)
    return SegmentSelection(slots, credit, boundaries, plan.quotas.masked_fill(unused, -1), plan.masses.float(), missed)


def _shape_of_layer(layer: tuple[LayerView, Tensor, Tensor, dict[str, Tensor]]) -> tuple:
    view, scores, _, state = layer
    windows = [None if window is None else window.positions.shape for window in (view.queries, view.spaced)]
    return scores.shape, windows, state["credit"].shape if "credit" in state else None


def _unstack(chosen: SegmentSelection, widths: list[int], with_credit: bool) -> list[Selection]:
    """One selection a layer, each as wide as its own largest budget."""
    parts = {field.name: getattr(chosen, field.name).chunk(len(widths)) for field in fields(chosen)}
    slots, credit = parts.pop("slots"), parts.pop("credit")
    return [
        Selection(
            slots=slots[layer][..., :width],
            state={"credit": credit[layer][..., :width]} if with_credit else {},
            details={name: tensors[layer] for name, tensors in parts.items()},
        )
        for layer, width in enumerate(widths)
    ]


def _check_shapes(scores: Tensor, usage: Tensor, credit: Tensor | None, valid: Tensor | None) -> None:
    for name, tensor in (("scores", scores), ("usage", usage), ("credit", credit)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}; convert it with .float()")
    shape = tuple(scores.shape)
    for name, tensor in (("usage", usage), ("valid", valid)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape of the scores, {shape}, got {tuple(tensor.shape)}")
    if credit is not None and (tuple(credit.shape[:-1]) != shape[:-1] or credit.shape[-1] > shape[-1]):
        raise ValueError(f"credit must have shape {shape[:-1]} + (at most {shape[-1]},), got {tuple(credit.shape)}")
