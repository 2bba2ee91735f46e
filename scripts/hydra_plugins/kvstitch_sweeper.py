"""Hydra's own grid sweeper, which in the end tells what became of every job."""

import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from relaunch import launch_in_rounds
from rich.console import Console
from sweep import ENDED, INTERRUPTED, Job, SweepFolder, Untold, read_jobs, require_success
from sweep_summary import write_summary
from sweep_table import print_jobs

from kvstitch.evaluation.records import RunError

# Launchers that leave no job at work when they give up. submitit's stops to look at the first that died, while others of its
# jobs run on or wait in the queue, and launched again they would meet themselves.
_ENDS_ITS_JOBS = ("joblib", "ray")


class TableSweeper(BasicSweeper):
    """Launches every combination; prints the table of jobs however the sweep ends.

    Raises:
        RunError: from `sweep`: a job has no result, the launcher gave up, or another sweep is at work in the same folder.
    """

    def sweep(self, arguments: list[str]) -> Any:
        with self._folder.held():
            return self._sweep(arguments)

    def _sweep(self, arguments: list[str]) -> Any:
        choice = self.config.hydra.runtime.choices["hydra/launcher"]
        noted = NotingLauncher(self.launcher, self._folder, choice in _ENDS_ITS_JOBS)
        self.launcher = noted
        try:
            returns = super().sweep(arguments)
        except Exception as error:
            if not noted.overrides:
                raise
            # A disk that refused kills nobody.
            is_refused = isinstance(error, RunError | OSError)
            self._close(noted.overrides, f"the sweep ended while it was at work: {error}" if is_refused else ENDED)
            if isinstance(error, RunError):
                raise
            raise RunError(f"the launcher gave up: {type(error).__name__}: {error}") from error
        except KeyboardInterrupt:
            if noted.overrides:
                self._close(noted.overrides, INTERRUPTED)
            raise
        require_success(self._close(noted.overrides))
        return returns

    def _close(self, overrides: Sequence[Sequence[str]], unfinished: str = ENDED) -> list[Job]:
        jobs = read_jobs(self._folder, overrides, unfinished)
        print_jobs(jobs, Console())
        try:
            summary = write_summary(self._folder, jobs)
        # The summary is beside the table: a run folder that it cannot read, or a bug in it, must hide neither how the jobs
        # went nor what ended the sweep.
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{self._folder.path} has no summary of the sweep: {why}", file=sys.stderr)
            return jobs
        if summary is not None:
            print(f"with spread over samples and seeds: {summary}")
        return jobs

    @cached_property
    def _folder(self) -> SweepFolder:
        return SweepFolder(Path(self.config.hydra.sweep.dir))


class NotingLauncher(Launcher):
    """Any launcher; remembers what it was told to launch, and what its jobs could not write.

    Args:
        inner: that launcher.
        sweep: where its jobs tell their states.
        relaunches: whether those that a dying process took along are launched again.
    """

    def __init__(self, inner: Launcher, sweep: SweepFolder, relaunches: bool):
        self._inner = inner
        self._sweep = sweep
        self._relaunches = relaunches
        self.overrides: list[Sequence[str]] = []

    def setup(self, **options: Any) -> None:
        self._inner.setup(**options)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.overrides.extend(job_overrides)
        if not self._relaunches:
            return self._launch(job_overrides, initial_job_idx)
        return launch_in_rounds(self._launch, job_overrides, initial_job_idx, self._sweep)

    def _launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        returns = self._inner.launch(job_overrides, initial_job_idx)
        for job in returns:
            if job.status == JobStatus.COMPLETED and isinstance(job.return_value, Untold):
                self._sweep.keep(job.return_value)
        return returns
