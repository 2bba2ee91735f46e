"""Samples become means; no torch, so that reports are drawn in a moment."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def summarise(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """`n`, `mean` and `std` (sample standard deviation) over the samples that have a value."""
    known = [float(value) for value in values if value is not None]
    return {
        "n": len(known),
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
    }


def summary(
    records: Sequence[Mapping[str, Any]], labels: Mapping[str, Any], skipped_records: Sequence[str] = ()
) -> dict[str, Any]:
    """What `metrics.json` holds: every metric with n, mean and standard deviation over samples.

    `budget_bound` is False if no sample ever had to evict anything, None without a press. `skipped_records` are those of the
    task's file that were malformed and left out; every shard of an evaluation names all of them.
    """
    measured = [record["metrics"] for record in records if "error" not in record]
    names = list(dict.fromkeys(name for metrics in measured for name in metrics))
    events = [metrics["events"] for metrics in measured if "events" in metrics]
    return {
        "run": dict(labels),
        "num_samples": len(records),
        "failed_samples": {record["id"]: record["error"] for record in records if "error" in record},
        "skipped_records": list(skipped_records),
        "budget_bound": any(events) if events else None,
        "metrics": {name: summarise(metrics.get(name) for metrics in measured) for name in names},
    }
