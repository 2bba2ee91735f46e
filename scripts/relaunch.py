"""Jobs that a dying process took along are launched again, so that in the end only who takes its process down is lost."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from itertools import groupby

from hydra.core.utils import JobReturn
from sweep import RUNNING, SweepFolder

from kvstitch.evaluation.records import RunError

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]


def launch_in_rounds(
    launch: Launch, overrides: Sequence[Sequence[str]], first: int, sweep: SweepFolder
) -> list[JobReturn]:
    """Launch jobs until each of them has told its state, however often the launcher gives up.

    Those that were at work when it gave up come again, one at a time: whoever does not survive that either is lost, and the
    reason is written into its folder. Those that had not begun then go together again, also where a process died before any
    job told its state, but that only once in a row.

    Args:
        launch: takes jobs and the number of the first; none of them is at work any more when it returns or raises.
        overrides: of each job.
        first: number of the first job.
        sweep: where the jobs tell their states. Jobs that `on_error=stop` leaves out do so, too, so that nothing need be
            known of it here.

    Returns:
        What the launcher returned of the jobs that it brought to their end.

    Raises:
        Exception: the launcher's own, where it could not begin a single job.
        KeyboardInterrupt: at once; nothing is launched again.
    """
    returns: list[JobReturn] = []

    def attempt(jobs: Sequence[Sequence[str]], number: int) -> Exception | None:
        try:
            returns.extend(launch(jobs, number))
        # What a launcher throws when a process dies is a class of its own library.
        except Exception as error:
            return error
        return None

    left, is_second_try = dict(enumerate(overrides, start=first)), False
    while left:
        errors = [error for number, jobs in _stretches(left) if (error := attempt(jobs, number)) is not None]
        suspects = [number for number in left if sweep.read(number)["state"] == RUNNING]
        if suspects:
            _say(f"{_what_ended(errors)} while at work on {_named(suspects)}: again, one at a time")
        for number in suspects:
            error = attempt([left[number]], number)
            if sweep.read(number)["state"] == RUNNING:
                sweep.lose(number, _reason(error))
        silent = {number: asked for number, asked in left.items() if not sweep.has_told(number)}
        if len(silent) < len(left):
            is_second_try = False
            if silent:
                _say(f"now what had not begun: {_named(silent)}")
        elif not is_second_try and any(isinstance(error, BrokenExecutor) for error in errors):
            is_second_try = True
            _say("a process died before any job had begun: once more")
        else:
            # No job began, so that it is the launcher which cannot.
            for error in errors:
                raise error
            break
        left = silent
    return returns


def _stretches(jobs: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, list[Sequence[str]]]]:
    """Launchers number their jobs one after the other: each run of successive numbers with its first."""
    for _, run in groupby(enumerate(jobs), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], [jobs[number] for number in numbers]


def _what_ended(errors: Sequence[Exception]) -> str:
    """A process that dies is told by a class of the launcher's library; a disk that refuses is nobody's death."""
    refused = [error for error in errors if isinstance(error, RunError | OSError)]
    return f"the launcher gave up ({_line(refused[0])})" if refused else "a process died"


def _reason(error: Exception | None) -> str:
    """Why a job is lost that was alone at work."""
    if isinstance(error, RunError | OSError):
        return f"the launcher gave up, also when nothing ran beside it ({_line(error)})"
    return f"its process died, also when nothing ran beside it{_how(error)}"


def _how(error: Exception | None) -> str:
    """How the process ended, as far as the launcher knows."""
    if error is None:
        return ""
    # loky lists the ends of its processes: {EXIT(3)}, {SIGKILL(-9)}.
    ends = re.findall(r"\b(EXIT|SIG[A-Z0-9]+)\((-?\d+)\)", str(error))
    words = [f"exit status {code}" if kind == "EXIT" else f"signal {kind}" for kind, code in ends]
    if "signal SIGKILL" in words:
        words.append("which is what the system sends when memory runs out")
    return f" ({', '.join(dict.fromkeys(words)) or _line(error)})"


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _named(numbers: Sequence[int] | Mapping[int, Sequence[str]]) -> str:
    return f"job{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
