"""Segments of fixed length with quotas: AMS without its adaptive boundaries."""

from dataclasses import dataclass

from kvstitch.allocators.mass_segments import MassSegments
from kvstitch.allocators.options import check_choices, check_counts


@dataclass(frozen=True, kw_only=True)
class FixedSegments(MassSegments):
    """Quotas over segments of equal length; an ablation of `SegmentQuota`, whose options these are.

    The public ablation still weighs quotas by mass; for equal treatment of all segments say `quota="length",
    credit=False`.

    Args:
        segment_tokens: valid slots of each segment; the last may be shorter.
        quota: "mass" shares the budget by window mass, "length" by length, "reference" by mass, rounded as the public
            code does.
    """

    segment_tokens: int = 128  # public ablation
    quota: str = "mass"  # public ablation
    min_keep_tokens: int = 1  # as SegmentQuota, and all below
    window_tokens: int = 128
    window_step: int = 8
    pool_kernel: int = 5
    credit_decay: float | int = 0.9
    credit_mix: float | int = 0.9
    num_sinks: int = 4
    num_recent: int = 32
    mass_pad: str = "visible_mean"
    pool_edges: str = "valid"
    sink_mass: str = "exclude"
    query_positions: str = "own"
    must_keep: str = "first_counted"
    must_priority: str = "sink"
    credit: bool = True
    credit_init: str = "zero"
    credit_scale: str = "mass"
    batch: str = "per_sample"
    mass_dtype: str = "float64"

    def __post_init__(self):
        check_choices(self, {"quota": ("mass", "length", "reference")})
        check_counts(self, {"segment_tokens": 1})
        self._derive(self.segment_tokens, rules=_UNUSED)


# The rules of cutting, splitting and merging, which a fixed grid never reads.
_UNUSED = {
    "segment_mass": 1.0,
    "min_segment_tokens": 1,
    "max_segment_tokens": 1,
    "boundary": "include",
    "split": "even",
    "merge": "forward",
}
