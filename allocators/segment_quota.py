"""AMS: segments of equal attention mass, a quota for each, competition only inside."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstitch.allocators.mass_segments import MassSegments
from kvstitch.allocators.options import check_choices, check_counts, check_switches


@dataclass(frozen=True, kw_only=True)
class SegmentQuota(MassSegments):
    """Adaptive mass segments with quotas (AMS, arXiv 2605.23200).

    The slots of a head are cut into segments of about equal mass, where mass is how much recent queries attend, mixed
    with the same from earlier events (credit). Each segment gets a floor and, beyond it, a share of the budget by its
    mass; the scorer decides inside segments only, so no peak of the scores can empty a region.

    The defaults are `recommended()`. `paper()` holds the paper's values, `reference()` what the public code
    (EIT-NLP/AdaptiveMassSegment) does, its rounding included.

    Args:
        segment_mass: mass after which a segment ends; 1 or more makes one segment.
        min_segment_tokens: shorter segments join a neighbour.
        max_segment_tokens: longer segments are split.
        min_keep_tokens: slots that each segment keeps if the budget can pay for all of them.
        window_tokens: recent queries that mass is measured with.
        window_step: of those every so-manieth and the newest; the others are not remembered.
        pool_kernel: odd width of the average along the sequence, 1 for none.
        credit_decay: share of the old credit that stays at an event.
        credit_mix: share of the present window in the mass; the rest is credit.
        num_sinks: first valid slots that are always kept.
        num_recent: last valid slots that are always kept.
        mass_pad, pool_edges, sink_mass, query_positions: see `Evidence`.
        must_keep: "first_counted" takes protected slots out of their own segment's quota; "first_separate" shares out
            only what the protected slots leave; "after" forgets them until the end, when they push out the lowest
            scores of the whole head, which can empty a segment.
        must_priority: who goes without if the budget cannot hold both: "sink" shortens the recent window, "suffix" the
            sinks.
        boundary: the slot at which the running mass reaches a threshold ends its segment ("include") or opens the next
            ("exclude", which also compares in float32 without tolerance, as the public code does).
        split: long segments fall into parts of almost equal length ("even") or of the maximum and a rest ("chunk").
        merge: short segments join the next one ("forward"), and a short last one the one before
            ("forward_then_tail"; what grows too long is then halved).
        quota: "waterfill" spends the budget exactly by mass between floors and lengths; "reference" rounds and repairs
            as the public code; "length" is "waterfill" by length instead of mass, the paper's ablation.
        credit: whether earlier events count.
        credit_init: credit of a new slot, "zero" or its "mass".
        credit_scale: what credit adds up: "mass", every event alike, or "usage" as it was measured (the public
            ablation "no mass", which still cuts and shares by mass).
        batch: "per_sample", or "batch_mean": one mass curve per head for the whole batch, as the public code.
        exact_target: False keeps one slot more than asked where the public code's ratio rounds that way.
        mass_dtype: "float64", or "float32" to repeat the public code's rounding.
    """

    segment_mass: float | int = 0.1  # paper
    min_segment_tokens: int = 8  # half of the paper's; with the next, a floor for every 8 to 16 slots of old text
    max_segment_tokens: int = 16  # the paper's 256 leave the far past a floor or two
    min_keep_tokens: int = 1  # paper
    window_tokens: int = 128  # paper
    window_step: int = 8  # as good as every query of the window, at an eighth of the work and a quarter of the memory
    pool_kernel: int = 5  # public registry; the paper says "small"
    credit_decay: float | int = 0.9  # paper
    credit_mix: float | int = 0.9  # paper
    num_sinks: int = 4  # paper
    num_recent: int = 32  # public registry; the paper names a suffix without its length
    mass_pad: str = "visible_mean"  # padding with a maximum gives the window most of the mass
    pool_edges: str = "valid"
    sink_mass: str = "exclude"  # sinks are kept anyway and hold about a third of the attention
    query_positions: str = "own"
    must_keep: str = "first_counted"  # paper's worked example
    must_priority: str = "sink"  # paper
    boundary: str = "include"  # paper
    split: str = "even"  # paper
    merge: str = "forward_then_tail"
    quota: str = "waterfill"
    credit: bool = True  # paper
    credit_init: str = "zero"
    credit_scale: str = "mass"  # paper
    batch: str = "per_sample"
    exact_target: bool = True
    mass_dtype: str = "float64"

    @classmethod
    def recommended(cls, **overrides: object) -> "SegmentQuota":
        """What measures best; the defaults."""
        return cls(**overrides)

    @classmethod
    def paper(cls, **overrides: object) -> "SegmentQuota":
        """The paper's values. Where it is silent: padding per head, 32 recent slots, protected slots counted."""
        stated = {
            "min_segment_tokens": 16,
            "max_segment_tokens": 256,
            "window_step": 1,
            "mass_pad": "head_max",
            "pool_edges": "zero",
            "sink_mass": "include",
        }
        return cls(**(stated | overrides))

    @classmethod
    def reference(cls, **overrides: object) -> "SegmentQuota":
        """What the public code does at commit 7eb32cd with its registry's values, segment for segment and bit for bit.

        Four things differ: it never hangs, `exact_target` keeps what was asked for (the public code one more for
        about a quarter of the lengths), rows with padding are not mixed up, and where 32 or fewer queries are held all of
        them are asked (the public code leaves one out).
        """
        done = {
            "segment_mass": 0.02,
            "min_segment_tokens": 32,
            "max_segment_tokens": 1024,
            "min_keep_tokens": 8,
            "credit_decay": 0.8,
            "credit_mix": 0.7,
            "window_tokens": 32,
            "window_step": 1,
            "mass_pad": "global_max",
            "pool_edges": "zero",
            "sink_mass": "include",
            "query_positions": "current",
            "must_keep": "after",
            "must_priority": "suffix",
            "boundary": "exclude",
            "split": "chunk",
            "merge": "forward",
            "quota": "reference",
            "batch": "batch_mean",
            "mass_dtype": "float32",
        }
        return cls(**(done | overrides))

    def __post_init__(self):
        choices = {
            "boundary": ("include", "exclude"),
            "split": ("even", "chunk"),
            "merge": ("forward_then_tail", "forward"),
            "quota": ("waterfill", "length", "reference"),
        }
        check_choices(self, choices)
        check_counts(self, {"min_segment_tokens": 1, "max_segment_tokens": 1})
        check_switches(self, ("exact_target",))
        if isinstance(self.segment_mass, bool) or not isinstance(self.segment_mass, int | float):
            raise TypeError(f"segment_mass must be a number, got {self.segment_mass!r}")
        if not self.segment_mass >= 1e-3:
            raise ValueError(f"segment_mass must be at least 0.001 (1,000 segments), got {self.segment_mass}")
        # Merging may add up to two short segments to one of maximal length; halves of that must not be short.
        least = self.min_segment_tokens * (2 if self.merge == "forward_then_tail" else 1)
        if self.max_segment_tokens < least:
            raise ValueError(
                f"max_segment_tokens must be at least {least} for min_segment_tokens={self.min_segment_tokens} and "
                f"merge={self.merge!r}, got {self.max_segment_tokens}"
            )
        self._derive(segment_tokens=None, rules={})

    def _target(self, keep: int | Tensor, slots: int) -> int | Tensor:
        if self.exact_target:
            return keep
        if isinstance(keep, int):
            return public_target(keep, slots)
        return torch.tensor([public_target(row, slots) for row in keep.tolist()], dtype=keep.dtype)


def public_target(keep: int, slots: int) -> int:
    """Slots that the public code keeps of `slots` when asked for `keep`: `keep` or one more.

    It looks for a ratio r with `int(slots * (1 - r)) == keep` by bisection and then rounds the same product instead of
    cutting it off.
    """
    if slots <= keep:
        return keep
    low, high, ratio = 0.0, 1.0, 1.0 - keep / slots
    for _ in range(20):
        kept = int(slots * (1 - ratio))
        if kept == keep:
            break
        low, high = (ratio, high) if kept > keep else (low, ratio)
        ratio = (low + high) / 2
    return round(slots * (1 - ratio))
