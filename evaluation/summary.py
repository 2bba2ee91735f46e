"""Samples become means; no torch, so that reports are drawn in a moment."""

import math
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


# Blind guessing among 10^43 words; beyond it the exponential says nothing and soon has no float.
_MOST_NATS = 100
_NLL = ("nll", "dense_nll")


def perplexity(nll: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """exp of a mean negative log-likelihood, of which every number but `n` is one of nats; spreads to first order.

    Of samples of equal length, as those of a text cut into pieces are, it is the perplexity of the whole text.

    Args:
        nll: as `summarise` gives it, perhaps with more spreads. Where the mean is None or above 100 nats, nothing is known.
    """
    mean = nll["mean"]
    if mean is None or mean > _MOST_NATS:
        return {name: value if name == "n" else None for name, value in nll.items()}
    scale = math.exp(mean)
    spreads = {name: value if value is None else scale * value for name, value in nll.items()}
    return spreads | {"n": nll["n"], "mean": scale}


def asks_nothing(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a task is about the text alone, so that its perplexity is what counts."""
    return not any(record.get("answers") for record in records)


def summary(
    records: Sequence[Mapping[str, Any]], labels: Mapping[str, Any], skipped_records: Sequence[str] = ()
) -> dict[str, Any]:
    """What `metrics.json` holds: every metric with n, mean and standard deviation over samples.

    `bound_samples` are those in which something was evicted or, by retrieval, left unread, and `budget_bound` is False if
    there is none; both None without a press. `skipped_records` are those of the task's file that were malformed and left
    out; every shard of an evaluation names all of them. Where a task asks nothing there is `perplexity`, too.

    `seeds` has one, that of the run, so that `spread_over_seeds` is None: runs that differ in the seed alone are joined by
    the report and at the end of a sweep, in `summary.json`.
    """
    measured = [record["metrics"] for record in records if "error" not in record]
    names = list(dict.fromkeys(name for metrics in measured for name in metrics))
    bound = [metrics["events"] > 0 for metrics in measured if metrics.get("events") is not None]
    means = {name: summarise(metrics.get(name) for metrics in measured) for name in names}
    if asks_nothing(records):
        means |= {name.replace("nll", "perplexity"): perplexity(means[name]) for name in _NLL if name in means}
    return {
        "run": dict(labels),
        "seeds": [labels["seed"]] if "seed" in labels else [],
        "spread_over_seeds": None,
        "num_samples": len(records),
        "failed_samples": {record["id"]: record["error"] for record in records if "error" in record},
        "skipped_records": list(skipped_records),
        "budget_bound": any(bound) if bound else None,
        "bound_samples": sum(bound) if bound else None,
        "metrics": means,
    }
