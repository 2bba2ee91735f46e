"""The jobs of a sweep: each leaves its state in a file, from which the closing table is drawn, wherever the job ran."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstitch.evaluation.records import ERROR, METRICS, RunError, RunFolder, write_text

DONE, READ, FAILED, RUNNING, NOT_RUN, LOST = "done", "read from before", "failed", "running", "not run", "lost"
ON_ERROR = ("continue", "stop")
# Why a job may have told no end.
ENDED, INTERRUPTED = "its process ended without a word; killed, or out of memory", "interrupted while at work"


@dataclass(frozen=True)
class SweepFolder:
    """The states of a sweep's jobs, one file each, so that jobs on other machines can write theirs.

    Args:
        path: a folder that all jobs share; made when something is written.
    """

    path: Path

    def write(self, number: int, state: str, folder: str | None = None, reason: str | None = None) -> None:
        """Note where job `number` stands."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"state": state, "folder": folder, "reason": reason}
        write_text(self._file(number), json.dumps(content, indent=2) + "\n")

    def read(self, number: int) -> dict[str, Any]:
        """What job `number` wrote last; a job that wrote nothing was not run."""
        file = self._file(number)
        if not file.exists():
            return {"state": NOT_RUN, "folder": None, "reason": None}
        return json.loads(file.read_text(encoding="utf-8"))

    def has_told(self, number: int) -> bool:
        """Whether job `number` wrote anything: it was begun, or left out on purpose."""
        return self._file(number).exists()

    def lose(self, number: int, reason: str) -> None:
        """Note for job `number`, which cannot any more, that its process died; in its run folder, too, if that is known.

        Raises:
            RunError: the disk is full or read-only.
        """
        folder = self.read(number)["folder"]
        self.write(number, LOST, folder, reason)
        if folder is not None:
            RunFolder(Path(folder)).write_error(
                f"{reason}\n\nThere is no traceback: the process had no time for one. The same command tries this job again."
                "\n"
            )

    def any_failed(self) -> bool:
        """Whether a job of the sweep has failed, or died, so far."""
        return any(json.loads(file.read_text())["state"] in (FAILED, LOST) for file in self.path.glob("job-*.json"))

    def _file(self, number: int) -> Path:
        return self.path / f"job-{number:05d}.json"


@dataclass(frozen=True)
class Job:
    """One line of the closing table.

    Args:
        overrides: what was asked for in this job.
        state: `done`, `read from before`, `failed`, `lost` (its process died) or `not run`.
        folder: its run folder, if its configuration could be composed.
        reason: why it failed.
    """

    overrides: tuple[str, ...]
    state: str
    folder: str | None
    reason: str | None

    @property
    def succeeded(self) -> bool:
        return self.state in (DONE, READ)


def read_jobs(sweep: SweepFolder, overrides: Sequence[Sequence[str]], unfinished: str = ENDED) -> list[Job]:
    """The jobs of a sweep that is over.

    Args:
        sweep: its folder.
        overrides: of each job.
        unfinished: why there may be jobs that were begun and told no end.
    """
    jobs = []
    for number, asked in enumerate(overrides):
        found = sweep.read(number)
        if found["state"] == RUNNING:
            found |= {"state": LOST, "reason": unfinished}
        jobs.append(Job(tuple(asked), **found))
    return jobs


def print_jobs(jobs: Sequence[Job], console: Console) -> None:
    """Every job with its state and, if it has results, what matters most of them."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    table = Table()
    table.add_column("job")
    table.add_column("state")
    for title in ("right", "dense", "KL"):
        table.add_column(title, justify="right")
    for number, job in enumerate(jobs):
        asked = " ".join(text for text in job.overrides if text not in shared) or "(no overrides)"
        style = "green" if job.succeeded else "bold red"
        table.add_row(f"{number} {asked}", f"[{style}]{job.state}[/{style}]", *_figures(job))
    console.print(table)
    for number, job in enumerate(jobs):
        if job.reason:
            console.print(f"{number} {job.state}: {job.reason}", markup=False, highlight=False)
            if job.folder is not None and (Path(job.folder) / ERROR).exists():
                console.print(f"  more in {job.folder}/error.txt", markup=False, highlight=False)


def require_success(jobs: Sequence[Job]) -> None:
    """Raises:
    RunError: not every job of the sweep has results.
    """
    missing = [job for job in jobs if not job.succeeded]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(jobs)} jobs have no complete result; the same command goes on where it can"
        )


def _figures(job: Job) -> list[str]:
    metrics = RunFolder(Path(job.folder)).read_json(METRICS) if job.folder else None
    if metrics is None:
        return ["", "", ""]
    means = [metrics["metrics"].get(name, {}).get("mean") for name in ("accuracy", "dense_accuracy", "kl")]
    right, dense, kl = means
    return [
        "" if right is None else f"{100 * right:.1f} %",
        "" if dense is None else f"{100 * dense:.1f} %",
        "" if kl is None else f"{kl:.4f}",
    ]
