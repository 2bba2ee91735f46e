"""The meter of memory: it sees what is allocated, also where the allocator could serve it from what was freed before."""

import os
import platform
from dataclasses import dataclass

import pytest
import torch

from kvstitch.evaluation.benchmarks import event, event_memory
from kvstitch.evaluation.benchmarks.event import EventBenchmark
from kvstitch.evaluation.benchmarks.event_memory import UNMEASURED, peak_extra_bytes
from kvstitch.scorers import KeyNorm

MIB = 2**20
TINY = dict(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8, threads=1)

# By what the machine has, not by what the meter says: one that stopped measuring must fail.
HAS_IT = platform.libc_ver()[0] == "glibc" and os.access("/proc/self/clear_refs", os.W_OK)
measurable = pytest.mark.skipif(not HAS_IT, reason=UNMEASURED)


def _allocate(mebibytes: int) -> None:
    """In pieces far below the size that malloc maps apart, so that they come from the heap and stay there when freed.

    The meter may miss what fits into pages that were in use before: a tenth of a MiB or so.
    """
    pieces = [bytearray(b"x") * (MIB // 16) for _ in range(16 * mebibytes)]
    del pieces


@measurable
def test_what_is_allocated_is_seen():
    assert 60 <= peak_extra_bytes(lambda: _allocate(64)) / MIB < 80


@measurable
def test_what_the_allocator_kept_from_earlier_work_counts_again():
    _allocate(128)
    assert 60 <= peak_extra_bytes(lambda: _allocate(64)) / MIB < 80


@measurable
def test_the_peak_counts_and_not_what_is_left():
    kept = []
    extra = peak_extra_bytes(lambda: (_allocate(96), kept.append(torch.ones(8 * MIB // 4))))
    assert 90 <= extra / MIB < 112


@measurable
def test_work_on_memory_that_exists_adds_nothing():
    held = torch.ones(64 * MIB // 4)
    assert 0 <= peak_extra_bytes(lambda: held.mul_(2)) / MIB < 8


@dataclass(frozen=True)
class _Wasteful(KeyNorm):
    def score(self, view):
        _allocate(64)
        return super().score(view)


@measurable
def test_the_row_of_memory_sees_a_wasteful_scorer(monkeypatch):
    monkeypatch.setitem(event.SCORERS, "frugal", KeyNorm())
    monkeypatch.setitem(event.SCORERS, "wasteful", _Wasteful())
    options = dict(scorers=(), memory_slots=512, memory_scorers=("frugal", "wasteful"), slots=96, keep=48)
    frugal, wasteful = (row["extra_mib"] for row in EventBenchmark(**TINY, **options).run())
    assert 0 <= frugal < 16 and 60 <= wasteful - frugal < 80


def test_where_nothing_can_be_measured_the_row_says_so(monkeypatch):
    monkeypatch.setattr(event_memory, "_heap_trimmer", lambda: None)
    options = dict(scorers=(), memory_slots=512, memory_scorers=("keydiff",), slots=96, keep=48)
    (row,) = EventBenchmark(**TINY, **options).run()
    assert row["extra_mib"] is None and row["note"] == UNMEASURED
