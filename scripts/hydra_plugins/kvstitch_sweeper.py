"""Hydra's own grid sweeper, which in the end tells what became of every job."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from rich.console import Console
from sweep import SweepFolder, print_jobs, read_jobs, require_success

from kvstitch.evaluation.records import RunError


class TableSweeper(BasicSweeper):
    """Launches every combination; prints the table of jobs however the sweep ends.

    Raises:
        RunError: from `sweep`: a job has no result, or the launcher gave up.
    """

    def sweep(self, arguments: list[str]) -> Any:
        noted = _NotingLauncher(self.launcher)
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
                self._close(noted.overrides)
            raise
        require_success(self._close(noted.overrides))
        return returns

    def _close(self, overrides: Sequence[Sequence[str]]) -> list:
        jobs = read_jobs(SweepFolder(Path(self.config.hydra.sweep.dir)), overrides)
        print_jobs(jobs, Console())
        return jobs


class _NotingLauncher(Launcher):
    """Any launcher; remembers what it was told to launch."""

    def __init__(self, inner: Launcher):
        self._inner = inner
        self.overrides: list[Sequence[str]] = []

    def setup(self, **options: Any) -> None:
        self._inner.setup(**options)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.overrides.extend(job_overrides)
        return self._inner.launch(job_overrides, initial_job_idx)
