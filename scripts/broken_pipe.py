"""Output into a reader that leaves early, such as `head`, ends quietly."""

import os
import signal
import sys
from collections.abc import Callable

STATUS = 128 + signal.SIGPIPE


def until_the_reader_leaves(main: Callable[[], int]) -> int:
    """What `main` returns, or the status of a process that SIGPIPE ended."""
    try:
        status = main()
        # Else what is left would be written when nobody can catch it any more.
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STATUS
    return status
