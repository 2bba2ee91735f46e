"""What one evaluated sample gives, whatever the mode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstitch.evaluation.tasks.base import Sample
from kvstitch.presses import CompactionEvent


@dataclass(frozen=True)
class SampleResult:
    """One sample's outcome.

    Args:
        record: what is written for it: plain values only, `metrics` flat, None where a metric has no value.
        events: the compactions along one sequence, in order.
        regions: what a retrieving press's index divided the sequence into, as arrays for a file; empty if nothing.
    """

    record: dict[str, Any]
    events: Sequence[CompactionEvent] = field(default=())
    regions: Mapping[str, np.ndarray] = field(default_factory=dict)


def make_record(
    sample: Sample, metrics: Mapping[str, float | None], answers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The line of `predictions.jsonl`."""
    return {
        "id": sample.id,
        "meta": dict(sample.meta),
        "context_tokens": sample.context_tokens,
        "metrics": dict(metrics),
        "answers": list(answers),
    }


def failed_record(sample: Sample, reason: str) -> dict[str, Any]:
    """The line of a sample that could not be measured; it counts in no metric and is not tried again."""
    return {"id": sample.id, "meta": dict(sample.meta), "context_tokens": sample.context_tokens, "error": reason}
