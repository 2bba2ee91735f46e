"""Files that can be read and still lack what a report needs: named by field, at no cost to other runs."""

import json

import pytest

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.tables import markdown

ABSENT = object()


def put(path, place, value):
    """Set a value by its dotted place in the first line of a file, or take it away."""
    first, _, rest = path.read_text().partition("\n") if path.suffix == ".jsonl" else (path.read_text(), "", "")
    content = inner = json.loads(first)
    *above, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    for key in above:
        inner = inner[key]
    if value is ABSENT:
        del inner[last]
    else:
        inner[last] = value
    write_text(path, json.dumps(content) + (f"\n{rest}" if rest else ""))


@pytest.mark.parametrize(
    "file, place, value, reason",
    [
        *[("metrics.json", f"run.{name}", None, f"metrics.json has no run.{name}") for name in ("press", "task", "model", "mode")],
        ("metrics.json", "run.mode", ABSENT, "metrics.json has no run.mode"),
        ("metrics.json", "run.press", 3, "metrics.json: run.press must be text, got 3"),
        ("metrics.json", "run", [], "metrics.json: run must be a mapping, got []"),
        ("metrics.json", "skipped_records", -1, "metrics.json: skipped_records must be a list, got -1"),
        ("metrics.json", "skipped_records", "x", "metrics.json: skipped_records must be a list, got 'x'"),
        ("metrics.json", "metrics.kl", 3, "metrics.json: metrics.kl must be a mapping, got 3"),
        ("config.yaml", "budget", "many", "config.yaml: budget must be a number of tokens, a share, or bytes such as 64MiB, got 'many'"),
        ("config.yaml", "budget", ABSENT, "config.yaml has no budget"),
        ("config.yaml", "task.num_shards", None, "config.yaml has no task.num_shards"),
        ("config.yaml", "seed", True, "config.yaml: seed must be a whole number, got True"),
        ("predictions.jsonl", "metrics", [], "sample 's0' of predictions.jsonl: metrics must be a mapping, got []"),
        ("predictions.jsonl", "metrics.kl", "low", "sample 's0' of predictions.jsonl: metrics.kl must be a number, got 'low'"),
        ("predictions.jsonl", "answers.1.meta", None, "sample 's0' of predictions.jsonl has no answers[1].meta"),
        ("predictions.jsonl", "answers.0.dense.score", ABSENT, "sample 's0' of predictions.jsonl has no answers[0].dense.score"),
    ],
)  # fmt: skip
def test_what_is_missing_or_of_another_kind_is_named(make_run, file, place, value, reason):
    good, bad = make_run(), make_run(budget=64)
    put(bad / file, place, value)
    runs, (problem,) = find_runs([good.parent])
    assert [run.path for run in runs] == [good]
    assert problem.path == bad and problem.reason == f"damaged: {reason}"
    assert reason in markdown(sections_of(runs), [problem])


def test_what_older_runs_do_not_have_is_no_fault(make_run):
    folder = make_run()
    put(folder / "metrics.json", "skipped_records", ABSENT)
    for name in ("scorer", "allocator", "seed", "budget"):
        put(folder / "metrics.json", f"run.{name}", ABSENT)
    put(folder / "predictions.jsonl", "metrics.kl", None)
    assert find_runs([folder])[1] == []


def test_shards_whose_sessions_are_missing_are_named(make_run):
    shards = [make_run(shard=index, num_shards=2) for index in range(2)]
    write_text(shards[0] / "run_meta.json", '{"x": 1}')
    runs, problems = find_runs(shards)
    assert not runs and problems[0].reason == "damaged: run_meta.json has no sessions"
