"""SIGTERM, which `kill`, `timeout` and batch systems send, ends a command as Ctrl-C does, workers and closing table included."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whoever tidies up after Ctrl-C does so for this, too."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated` in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
