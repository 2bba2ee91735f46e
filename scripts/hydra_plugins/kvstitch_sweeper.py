"""Hydra's own grid sweeper, which in the end tells what became of every job."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from relaunch import launch_in_rounds
from rich.console import Console
from sweep import ENDED, INTERRUPTED, Job, SweepFolder, print_jobs, read_jobs, require_success
from sweep_summary import write_summary

from kvstitch.evaluation.records import RunError

# Launchers that leave no job at work when they give up. submitit's stops to look at the first that died, while others of its
# jobs run on or wait in the queue, and launched again they would meet themselves.
_ENDS_ITS_JOBS = ("joblib", "ray")


class TableSweeper(BasicSweeper):
    """Launches every combination; prints the table of jobs however the sweep ends.

    Raises:
        RunError: from `sweep`: a job has no result, or the launcher gave up.
    """

    def sweep(self, arguments: list[str]) -> Any:
        choice = self.config.hydra.runtime.choices["hydra/launcher"]
        noted = NotingLauncher(self.launcher, self._folder if choice in _ENDS_ITS_JOBS else None)
        self.launcher = noted
        try:
            returns = super().sweep(arguments)
        except Exception as error:
            if noted.overrides:
                self._close(noted.overrides)
                raise RunError(f"the launcher gave up: {type(error).__name__}: {error}") from error
            raise
        except KeyboardInterrupt:
            if noted.overrides:
                self._close(noted.overrides, INTERRUPTED)
            raise
        require_success(self._close(noted.overrides))
        return returns

    def _close(self, overrides: Sequence[Sequence[str]], unfinished: str = ENDED) -> list[Job]:
        jobs = read_jobs(self._folder, overrides, unfinished)
        print_jobs(jobs, Console())
        summary = write_summary(self._folder, jobs)
        if summary is not None:
            print(f"with spread over samples and seeds: {summary}")
        return jobs

    @property
    def _folder(self) -> SweepFolder:
        return SweepFolder(Path(self.config.hydra.sweep.dir))


class NotingLauncher(Launcher):
    """Any launcher; remembers what it was told to launch.

    Args:
        inner: that launcher.
        sweep: where its jobs tell their states, if those that a dying process took along are to be launched again.
    """

    def __init__(self, inner: Launcher, sweep: SweepFolder | None = None):
        self._inner = inner
        self._sweep = sweep
        self.overrides: list[Sequence[str]] = []

    def setup(self, **options: Any) -> None:
        self._inner.setup(**options)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.overrides.extend(job_overrides)
        if self._sweep is None:
            return self._inner.launch(job_overrides, initial_job_idx)
        return launch_in_rounds(self._inner.launch, job_overrides, initial_job_idx, self._sweep)
