"""Work beside the forward pass, with results that do not depend on when it ran."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter, thread_time
from typing import Any


class Job:
    """A piece of work, in a pool or not yet begun."""

    def __init__(self, function: Callable[[], Any], pool: ThreadPoolExecutor | None):
        self._function = function
        self._future: Future | None = None if pool is None else pool.submit(self._timed)
        self._outcome: tuple[Any, float] | None = None

    def result(self) -> Any:
        """Waits for the work, or does it here if it has not begun."""
        if self._outcome is None:
            queued = self._future is None or self._future.cancel()
            self._outcome = self._timed() if queued else self._future.result()
        return self._outcome[0]

    @property
    def seconds(self) -> float:
        """Processor time that the work took; it is done once `result` was called."""
        return self._outcome[1]

    def cancel(self) -> None:
        """Spares the work if it has not begun."""
        if self._future is not None:
            self._future.cancel()

    def __deepcopy__(self, memo: dict) -> "Job":
        # A copied cache waits for the same work.
        return self

    def _timed(self) -> tuple[Any, float]:
        start = thread_time()
        result = self._function()
        return result, thread_time() - start


class Background:
    """A pool that exists between `open` and `close`; without one, work is done when its result is asked for.

    Args:
        workers: threads; 0 for no pool.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self.busy_seconds = 0.0
        self.exposed_seconds = 0.0

    def __deepcopy__(self, memo: dict) -> "Background":
        return self

    def open(self) -> None:
        if self._workers > 0 and self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="kvstitch")

    def close(self) -> None:
        """Waits for what runs and drops what is queued; a dropped job still gives its result when asked."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Callable[[], Any]) -> Job:
        return Job(function, self._pool)

    def collect(self, jobs: list[Job]) -> list[Any]:
        """The results; `busy_seconds` grows by the work done, `exposed_seconds` by what the caller waited."""
        start = perf_counter()
        results = [job.result() for job in jobs]
        self.exposed_seconds += perf_counter() - start
        self.busy_seconds += sum(job.seconds for job in jobs)
        return results
