"""The numbers and switches of mass segments, in one value that every implementation of the kernel reads."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SegmentRules:
    """What `SegmentQuota` and `FixedSegments` document field by field; checked there.

    Args:
        segment_tokens: segments of this many slots instead of segments of equal mass; None for the latter.
        mass_dtype: "float64", or "float32" to round as the public code does.
    """

    segment_mass: float
    min_segment_tokens: int
    max_segment_tokens: int
    min_keep_tokens: int
    credit_decay: float
    credit_mix: float
    num_sinks: int
    num_recent: int
    must_keep: str
    must_priority: str
    boundary: str
    split: str
    merge: str
    quota: str
    credit: bool
    credit_init: str
    credit_scale: str
    batch: str
    mass_dtype: str
    segment_tokens: int | None = None
