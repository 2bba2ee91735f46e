"""Times on a GPU by its own clock, on a CPU by the wall's, and the two rates that floors are made of."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvstitch.evaluation.benchmarks.timing import Contestant

# More than the second-level cache of any card so far holds, and long enough to clear (a quarter of a millisecond on an
# H200) for the host to launch what an operator consists of.
_FLUSH_BYTES = 2**30
# Few rounds are enough where one takes long.
_FEWEST_ROUNDS, _ENOUGH_SEC = 3, 1.5


def resolve_device(device: str) -> str:
    """ "cuda" or "cpu"; "auto" takes a GPU if there is one.

    Raises:
        ValueError: something else, or "cuda" where there is none.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device must be one of 'auto', 'cuda', 'cpu', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs a GPU that torch can use; take 'auto' or 'cpu'")
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def median_seconds(contestants: Mapping[str, Contestant], rounds: int, device: str) -> dict[str, float]:
    """Seconds of each contestant, taking turns; on a GPU each starts with a cold second-level cache.

    There at most `rounds`, and fewer where a round takes long.
    """
    if device == "cpu":
        return _median_seconds_of_cpu(contestants, rounds)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    warm_up, number, started = 1, 0, time.perf_counter()
    while number < warm_up + rounds:
        # While the GPU clears the buffer the launches that follow queue up, so that it never waits for them.
        marks = {name: _launched(contestant, flush) for name, contestant in contestants.items()}
        torch.cuda.synchronize()
        number += 1
        if number <= warm_up:
            # The first round compiles.
            started = time.perf_counter()
            continue
        for name, (begin, end) in marks.items():
            samples[name].append(begin.elapsed_time(end) / 1e3)
        if number >= warm_up + _FEWEST_ROUNDS and time.perf_counter() - started > _ENOUGH_SEC:
            break
    return {name: statistics.median(values) for name, values in samples.items()}


def _median_seconds_of_cpu(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, float]:
    """Without a collection of garbage before each run, which takes longer than small kernels by far."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(1 + rounds):
        for name, contestant in contestants.items():
            prepared = contestant.prepare()
            start = time.perf_counter()
            contestant.run(prepared)
            if number:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def _launched(contestant: Contestant, flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    prepared = contestant.prepare()
    flush.zero_()
    begin.record()
    contestant.run(prepared)
    end.record()
    return begin, end


@dataclass(frozen=True)
class Rates:
    """What the device does at most, as measured.

    Args:
        bytes_per_sec: read and written by a large copy.
        flops_per_sec: of a large matrix product in the dtype that is benchmarked.
    """

    bytes_per_sec: float
    flops_per_sec: float

    def floor_seconds(self, num_bytes: int, flops: int) -> float:
        """No version of the work is faster than this."""
        return max(num_bytes / self.bytes_per_sec, flops / self.flops_per_sec)


def measure_rates(device: str, dtype: torch.dtype, rounds: int = 5) -> Rates:
    """Both rates, on random numbers: products of zeros run faster than any real ones."""
    on_gpu = device == "cuda"
    elements, side = (2**28, 8192) if on_gpu else (2**22, 256)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copying = median_seconds({"copy": _always(lambda: target.copy_(source))}, rounds, device)["copy"]
    del source, target
    left, right = torch.randn(2, side, side, device=device).to(dtype).unbind()
    product = torch.empty_like(left)
    multiplying = median_seconds({"matmul": _always(lambda: torch.mm(left, right, out=product))}, rounds, device)
    return Rates(2 * 4 * elements / copying, 2 * side**3 / multiplying["matmul"])


def _always(action: Callable[[], object]) -> Contestant:
    return Contestant(lambda _: action())
