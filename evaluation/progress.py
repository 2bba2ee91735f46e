"""How a run shows that it moves: a bar with running figures in a terminal, one line a sample elsewhere."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from kvstitch.evaluation.metrics import summarise

Record = Mapping[str, Any]


class Progress:
    """Reports to one stream.

    Args:
        stream: where to; a terminal gets a bar. `None`: standard error.
        label: stands before each line, where several runs write to the same stream. Bars would write over each other, so
            there is none then.
    """

    def __init__(self, stream: TextIO | None = None, label: str = ""):
        self._stream = stream or sys.stderr
        self._label = label
        self._bar: tqdm | None = None
        self._total: int | None = None
        self._sample_started = 0.0

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.clear()
        print(f"{self._label}{text}", file=self._stream, flush=True)

    def start(self, total: int | None, finished: Sequence[Record]) -> None:
        """Samples begin; `finished` ones were found in the run folder."""
        self._total = total
        self._sample_started = time.perf_counter()
        if finished:
            number = len(finished)
            self.note(f"resuming: {number} {'sample is' if number == 1 else 'samples are'} finished already")
        if not self._label and _shows_a_bar(self._stream):
            self._bar = tqdm(total=total, initial=len(finished), unit="sample", file=self._stream, dynamic_ncols=True)

    def advance(self, records: Sequence[Record]) -> None:
        """One more sample is recorded; it is the last of `records`."""
        if self._bar is not None:
            self._bar.set_postfix_str(running_figures(records), refresh=False)
            self._bar.update()
            return
        now = time.perf_counter()
        of_total = "" if self._total is None else f"/{self._total}"
        seconds, self._sample_started = now - self._sample_started, now
        record = records[-1]
        outcome = f"failed: {record['error']}" if "error" in record else running_figures([record])
        self.note(f"[{len(records)}{of_total}] {record['id']}: {outcome} ({seconds:.1f} s)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _shows_a_bar(stream: TextIO) -> bool:
    # A terminal that does not know its size, as in some containers, would get an empty bar.
    return stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 0


def running_figures(records: Sequence[Record]) -> str:
    """What matters most so far, means over the records, e.g. `right 0.67 (dense 0.83), KL 0.052, 5 events`."""
    measured = [record["metrics"] for record in records if "error" not in record]

    def mean(name: str) -> float | None:
        return summarise(metrics.get(name) for metrics in measured)["mean"]

    parts = []
    if mean("accuracy") is not None:
        parts.append(f"right {mean('accuracy'):.2f} (dense {mean('dense_accuracy'):.2f})")
    elif mean("dense_accuracy") is not None:
        parts.append(f"dense right {mean('dense_accuracy'):.2f}")
    if mean("kl") is not None:
        parts.append(f"KL {mean('kl'):.3f}")
    elif mean("dense_nll") is not None:
        parts.append(f"dense NLL {mean('dense_nll'):.3f}")
    if mean("events") is not None:
        parts.append(f"{mean('events'):.3g} events")
    return ", ".join(parts) or "nothing measured"
