"""A bar in a terminal, lines elsewhere."""

import fcntl
import os
import select
import struct
import termios
from contextlib import contextmanager
from io import StringIO

from kvstitch.evaluation.progress import Progress, running_figures


@contextmanager
def terminal(lines: int):
    """A pseudo-terminal: the stream to write to, and what arrived at the other end."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 110, 0, 0))
    with open(writer, "w") as stream:
        yield stream, lambda: drained(reader)
    os.close(reader)


def drained(reader: int) -> str:
    """All that arrives; a terminal hands over line by line."""
    parts = []
    while select.select([reader], [], [], 1.0)[0]:
        parts.append(os.read(reader, 100_000))
    return b"".join(parts).decode()


def record(name, **metrics):
    return {"id": name, "metrics": metrics}


FIRST = record("a", accuracy=1.0, dense_accuracy=1.0, kl=0.05, events=4)
SECOND = record("b", accuracy=0.0, dense_accuracy=1.0, kl=0.15, events=5)


def drive(stream):
    progress = Progress(stream)
    progress.start(2, [])
    progress.advance([FIRST])
    progress.advance([FIRST, SECOND])
    progress.close()
    stream.flush()


def test_of_several_runs_each_line_says_whose_it_is():
    with terminal(24) as (stream, arrived):
        progress = Progress(stream, "job 3: ")
        progress.note("run folder: x")
        progress.start(1, [])
        progress.advance([FIRST])
        progress.close()
        stream.flush()
        lines = arrived().splitlines()
    # No bar, although this is a terminal: those of several would write over each other.
    assert lines[0] == "job 3: run folder: x" and lines[1].startswith("job 3: [1/1] a: right 1.00") and len(lines) == 2


def test_lines_tell_each_sample():
    stream = StringIO()
    drive(stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("[1/2] a: right 1.00 (dense 1.00), KL 0.050, 4 events (")
    assert lines[1].startswith("[2/2] b: right 0.00 (dense 1.00), KL 0.150, 5 events (")


def test_a_terminal_gets_a_bar_with_means_so_far():
    with terminal(lines=30) as (stream, shown):
        drive(stream)
        text = shown()
    assert "2/2" in text and "right 0.50 (dense 1.00), KL 0.100, 4.5 events" in text and "[2/2]" not in text


def test_a_terminal_without_a_size_gets_lines():
    with terminal(lines=0) as (stream, shown):
        drive(stream)
        assert "[2/2] b: right 0.00" in shown()


def test_figures_of_other_modes():
    assert (
        running_figures([record("a", dense_accuracy=0.5, accuracy=None, dense_nll=2.5)])
        == "dense right 0.50, dense NLL 2.500"
    )
    assert running_figures([{"id": "a", "error": "x"}]) == "nothing measured"


def test_a_failed_sample_says_why():
    stream = StringIO()
    progress = Progress(stream)
    progress.start(None, [])
    progress.advance([{"id": "a", "error": "NaN"}])
    assert stream.getvalue().startswith("[1] a: failed: NaN (")
