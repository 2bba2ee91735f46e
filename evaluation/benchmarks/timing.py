"""Interleaved timing: every round runs each contestant once, and medians are taken over the rounds."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    Args:
        run: what is timed; takes what `prepare` returned.
        prepare: makes a fresh input before each round, outside the clock.
    """

    run: Callable[[object], object]
    prepare: Callable[[], object] = lambda: None


def interleaved_seconds(
    contestants: Mapping[str, Contestant], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, float]]:
    """Seconds of each contestant: median, and the quartiles as a sign of how quiet the machine was."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(warm_up + rounds):
        for name, contestant in contestants.items():
            prepared = contestant.prepare()
            gc.collect()
            _synchronise()
            start = time.perf_counter()
            contestant.run(prepared)
            _synchronise()
            if number >= warm_up:
                samples[name].append(time.perf_counter() - start)
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median_sec": middle, "lower_quartile_sec": low, "upper_quartile_sec": high}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
