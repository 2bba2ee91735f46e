"""Work beside the forward pass, with results that do not depend on when it ran."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any
from weakref import WeakSet


class Job:
    """A piece of work, in a pool or not yet begun."""

    def __init__(self, function: Callable[[], Any], pool: ThreadPoolExecutor | None):
        self._function = function
        self._future: Future | None = None
        self._outcome: tuple[Any, float] | None = None
        self.begin(pool)

    def begin(self, pool: ThreadPoolExecutor | None) -> None:
        """Goes into a pool, unless it is in one or done already; a pool that was closed may have dropped it."""
        dropped = self._future is None or self._future.cancelled()
        if pool is not None and dropped and self._outcome is None:
            self._future = pool.submit(self._timed)

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
        workers: threads; 0 for no pool, None for as many as the process has cores.
    """

    def __init__(self, workers: int | None):
        self._workers = _cores() if workers is None else workers
        self._pool: ThreadPoolExecutor | None = None
        self._is_holding = False
        # Not kept alive: an index that no longer wants its work lets go of it.
        self._held: WeakSet[Job] = WeakSet()
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
        if not self._is_holding:
            return Job(function, self._pool)
        job = Job(function, None)
        self._held.add(job)
        return job

    @contextmanager
    def holding(self, hold: bool) -> Iterator[None]:
        """What is submitted meanwhile begins with `release`, or when its result is asked for; `hold` False: at once."""
        self._is_holding = hold
        try:
            yield
        finally:
            self._is_holding = False

    def release(self) -> None:
        """Begins what was held."""
        while self._held:
            self._held.pop().begin(self._pool)

    def collect(self, jobs: list[Job]) -> list[Any]:
        """The results; `busy_seconds` grows by the work done, `exposed_seconds` by what the caller waited."""
        start = perf_counter()
        for job in jobs:
            job.begin(self._pool)
        results = [job.result() for job in jobs]
        self.exposed_seconds += perf_counter() - start
        self.busy_seconds += sum(job.seconds for job in jobs)
        return results


def _cores() -> int:
    """Cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
