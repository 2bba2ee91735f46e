"""The table that closes a sweep: every job with its state, its figures, and why it has none."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from sweep import Job

from kvstitch.evaluation.records import ERROR, METRICS, RunError, RunFolder

_FIGURES = ("accuracy", "dense_accuracy", "kl")


def print_jobs(jobs: Sequence[Job], console: Console) -> None:
    """Every job with its state and, if it has results that can be read, what matters most of them."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    table = Table()
    table.add_column("job")
    table.add_column("state")
    for title in ("right", "dense", "KL"):
        table.add_column(title, justify="right")
    notes = []
    for number, job in enumerate(jobs):
        asked = " ".join(text for text in job.overrides if text not in shared) or "(no overrides)"
        figures, fault = _figures(job)
        # As Text: rich would read the brackets of a list as its own markup.
        state = Text(job.state, style="green" if job.succeeded else "bold red")
        table.add_row(Text(f"{number} {asked}"), state, *figures)
        reasons = [job.reason] if job.reason else []
        if fault is not None and fault not in (job.reason or ""):
            reasons.append(fault)
        if reasons:
            notes.append(f"{number} {job.state}: {'; '.join(reasons)}")
            if job.reason and job.folder is not None and os.path.exists(Path(job.folder) / ERROR):
                notes.append(f"  more in {job.folder}/error.txt")
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _figures(job: Job) -> tuple[list[str], str | None]:
    """The cells of a job's results, empty where there are none, and what is wrong with its `metrics.json`."""
    empty = [""] * len(_FIGURES)
    if job.folder is None:
        return empty, None
    try:
        metrics = RunFolder(Path(job.folder)).read_json(METRICS)
    except (RunError, OSError) as error:
        return empty, str(error)
    if metrics is None:
        return empty, None
    if not isinstance(metrics.get("metrics"), Mapping):
        return empty, f"{job.folder}/{METRICS} is damaged (it has no metrics); move {job.folder} away"
    right, dense, kl = (_mean(metrics["metrics"].get(name)) for name in _FIGURES)
    cells = [
        "" if right is None else f"{100 * right:.1f} %",
        "" if dense is None else f"{100 * dense:.1f} %",
        "" if kl is None else f"{kl:.4f}",
    ]
    return cells, None


def _mean(value: Any) -> float | None:
    mean = value.get("mean") if isinstance(value, Mapping) else None
    return mean if isinstance(mean, int | float) else None
