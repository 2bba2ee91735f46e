"""How much resident memory a call adds at its peak."""

import ctypes
import gc
import os
from collections.abc import Callable

from kvstitch.evaluation.environment import peak_memory, reset_peak_memory

UNMEASURED = "not measured: needs Linux with glibc, and a /proc/self/clear_refs that may be written"


def peak_extra_bytes(work: Callable[[], object]) -> int | None:
    """Resident bytes of this process at the peak of `work()`, less those before it; None where that cannot be known.

    What earlier work freed is first given back to the system (`malloc_trim`): an allocator keeps it otherwise, and a call
    that lives off it would seem to need nothing. Device memory is not counted.
    """
    trim = _heap_trimmer()
    if trim is None or not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    gc.collect()
    trim(0)
    reset_peak_memory()
    before = peak_memory()["peak_process_bytes"]
    work()
    return peak_memory()["peak_process_bytes"] - before


def _heap_trimmer() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`, or None under another C library or on Windows."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
