"""The command times one kernel, ends with one line of JSON, and fails if a kernel is wrong."""

import json

import pytest

from kvstitch.evaluation.benchmarks import kernels_checks
from kvstitch.evaluation.benchmarks.kernels_checks import Difference

SMALL = ("bench=compact", "bench.device=cpu", "bench.rounds=2", "bench.workload.length=64", "bench.workload.kept=16")


def test_a_kernel_is_checked_and_timed(script):
    outcome = script("bench", *SMALL)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    check, timed = found["rows"]
    assert found["bench"] == "compact" and found["machine"]["torch"]
    assert check["passed"] and timed["operator"] == "compact" and timed["length"] == 64 and timed["ms"] > 0


def test_a_wrong_kernel_is_named_and_not_timed(script, monkeypatch):
    monkeypatch.setitem(kernels_checks.CHECKS, "compact", lambda setting: iter([Difference("keys", 1.0, 0.0)]))
    outcome = script("bench", *SMALL)
    assert outcome.status == 1
    (check,) = json.loads(outcome.out.splitlines()[-1])["rows"]
    assert not check["passed"] and check["worst"] == "keys"
    assert "not timed, because they are wrong on this machine: compact" in outcome.err


def test_without_a_choice_all_are_named(script):
    outcome = script("bench")
    assert outcome.status == 1 and outcome.err.startswith(
        "error: a bench must be chosen: add bench=<choice>, one of comm"
    )
    assert outcome.err.count("\n") == 1 and "topk_attention" in outcome.err


@pytest.mark.parametrize("override", ["bench.device=tpu", "bench.nonsense=1", "+a=1", "+bench.a=1"])
def test_mistakes_get_one_message(script, override):
    outcome = script("bench", *SMALL, override)
    assert outcome.status == 1 and "Traceback" not in outcome.err


def test_a_count_that_cannot_be_is_refused_before_anything_is_made(script, monkeypatch):
    from kvstitch.evaluation.benchmarks.event import EventBenchmark

    monkeypatch.setattr(EventBenchmark, "run", lambda self: pytest.fail("it began"))
    outcome = script("bench", "bench=event", "bench.rounds=0")
    assert outcome.status == 1 and outcome.err == "error: bench.rounds must be at least 1, got 0\n"
