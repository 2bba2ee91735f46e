"""The benchmark of events at tiny sizes: every scorer has its row, and memory is measured."""

from importlib.util import find_spec

import pytest

from kvstitch.evaluation.benchmarks.event import SCORERS, EventBenchmark

TINY = dict(slots=96, keep=48, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8, rounds=2, threads=1)


def test_a_row_for_each_scorer_and_one_of_memory():
    if find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")
    rows = EventBenchmark(**TINY, memory_slots=512).run()
    timed, memory = [row for row in rows if row["kind"] == "time"], [row for row in rows if row["kind"] == "memory"]
    assert [row["scorer"] for row in timed] == list(SCORERS)
    for row in timed:
        assert row["topk_ms"] > 0 and row["ams_ms"] > 0 and row["ams_paper_ms"] > 0 and row["ams_to_topk"] > 0
        assert ("ams_to_kvpress" in row) == (row["scorer"] not in ("rkv", "triattention"))
    assert [row["scorer"] for row in memory] == ["rkv"] and memory[0]["slots"] == 512 and memory[0]["extra_mib"] >= 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scorers": ("tovaa",)}, "scorers must be among tova, .*, got tovaa"),
        ({"memory_scorers": ("rvk",)}, "got rvk"),
        ({"rounds": 0}, "bench.rounds must be at least 1, got 0"),
        ({"threads": 0}, "bench.threads must be at least 1, got 0"),
        ({"memory_layers": -1}, "bench.memory_layers must be at least 1, got -1"),
        ({"keep": 96}, "keep must lie between 0 and slots=96, got 96"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        EventBenchmark(**TINY | options)
