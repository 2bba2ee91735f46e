"""The jobs of a sweep: each leaves its state in a file, from which the closing table is drawn, wherever the job ran."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from kvstitch.evaluation.records import METRICS, RunError, RunFolder, write_text

DONE, READ, FAILED, RUNNING, NOT_RUN, LOST = "done", "read from before", "failed", "running", "not run", "lost"
ON_ERROR = ("continue", "stop")
SUMMARY = "summary.json"
# Why a job may have told no end.
ENDED, INTERRUPTED = (
    "its process ended without a word; killed, or out of memory",
    "interrupted while at work; what it finished is kept, and the same command goes on from there",
)
NOT_AGAIN = "its process died while others ran beside it; not tried again because of on_error=stop"


class Untold(NamedTuple):
    """What a job could not write into the folder of its sweep. It goes back to the process that launched it instead."""

    number: int
    told: dict[str, Any]


@dataclass(frozen=True)
class SweepFolder:
    """The states of a sweep's jobs, one file each, so that jobs on other machines can write theirs.

    Args:
        path: a folder that all jobs share; made when something is written.
        kept: states that a full disk did not take, known in this process alone.
    """

    path: Path
    kept: dict[int, dict[str, Any]] = field(default_factory=dict, compare=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for one sweep, and clear it of the states of an earlier one, which say nothing of this.

        Raises:
            RunError: another sweep holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # Not `.lock`, which is that of a run folder.
        lock = FileLock(self.path / ".sweep.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise RunError(
                f"hydra.sweep.dir={self.path} is in use by another sweep; wait for it, name another folder, or leave the "
                "option out, then every sweep has its own"
            ) from None
        try:
            for file in [*self._files(), self.path / SUMMARY]:
                file.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def write(self, number: int, state: str, folder: str | None = None, reason: str | None = None) -> None:
        """Note where job `number` stands.

        Raises:
            RunError: the disk is full or read-only.
        """
        content = {"state": state, "folder": folder, "reason": reason}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self._file(number), json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self._file(number)}: {error.strerror}") from error

    def tell(self, number: int, state: str, folder: str | None = None, reason: str | None = None) -> Untold | None:
        """The same for who has nobody to raise to; returns what could not be written, with the disk's reason."""
        try:
            self.write(number, state, folder, reason)
        except RunError as error:
            # The disk may have been the job's reason, too.
            reasons = [text for text in (reason, str(error)) if text]
            why = reasons[0] if str(error) in reasons[0] else "; ".join(reasons)
            return Untold(number, {"state": state, "folder": folder, "reason": why})
        return None

    def keep(self, untold: Untold) -> None:
        """Remember what a job could not write."""
        self.kept[untold.number] = untold.told

    def read(self, number: int) -> dict[str, Any]:
        """What job `number` told last; a job that told nothing was not run."""
        if number in self.kept:
            return dict(self.kept[number])
        file = self._file(number)
        if not file.exists():
            return {"state": NOT_RUN, "folder": None, "reason": None}
        return json.loads(file.read_text(encoding="utf-8"))

    def has_told(self, number: int) -> bool:
        """Whether job `number` told anything: it was begun, or left out on purpose."""
        return number in self.kept or self._file(number).exists()

    def lose(self, number: int, reason: str) -> Untold | None:
        """Note for job `number`, which cannot any more, that its process died; in its run folder, too, if that is known.

        What a full disk does not take is kept, and returned for who launched this process.
        """
        folder = self.read(number)["folder"]
        if folder is not None:
            reason += tell_run_folder(
                RunFolder(Path(folder)),
                f"{reason}\n\nThere is no traceback: the process had no time for one. The same command tries this job again."
                "\n",
            )
        untold = self.tell(number, LOST, folder, reason)
        if untold is not None:
            self.keep(untold)
        return untold

    def leave_out(self, number: int) -> Untold | None:
        """Note that `on_error=stop` leaves job `number` out. If it had begun before, its process died, and that is told."""
        if self.read(number)["state"] == RUNNING:
            return self.lose(number, NOT_AGAIN)
        return self.tell(number, NOT_RUN)

    def any_failed(self) -> bool:
        """Whether a job of the sweep has failed, or died, so far."""
        told = [*self.kept.values(), *(json.loads(file.read_text(encoding="utf-8")) for file in self._files())]
        return any(each["state"] in (FAILED, LOST) for each in told)

    def _files(self) -> list[Path]:
        return [path for path in self.path.glob("job-*.json") if re.fullmatch(r"job-\d{5,}\.json", path.name)]

    def _file(self, number: int) -> Path:
        return self.path / f"job-{number:05d}.json"


def tell_run_folder(folder: RunFolder, text: str) -> str:
    """Write the `error.txt` of a run; returns what to add to the reason in it if that fails."""
    try:
        folder.write_error(text)
    # Whatever hinders the note must not take the place of what it is about.
    except Exception as error:
        return f" (error.txt could not be written: {error})"
    return ""


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
            # It may have come to its end without being able to tell.
            found |= {"state": DONE} if _has_results(found["folder"]) else {"state": LOST, "reason": unfinished}
        jobs.append(Job(tuple(asked), **found))
    return jobs


def _has_results(folder: str | None) -> bool:
    try:
        metrics = None if folder is None else RunFolder(Path(folder)).read_json(METRICS)
    except (RunError, OSError):
        return False
    return metrics is not None and not metrics.get("failed_samples")


def require_success(jobs: Sequence[Job]) -> None:
    """Raises:
    RunError: not every job of the sweep has results.
    """
    missing = [job for job in jobs if not job.succeeded]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(jobs)} jobs have no complete result; the same command goes on where it can"
        )
