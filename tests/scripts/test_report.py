"""From real runs to a report with one more command."""

import csv
from pathlib import Path

from kvstitch.evaluation.report import find_runs


def unsteady_apart(record):
    unsteady = ("second", "time", "peak_process", "dense_reused")
    return record | {
        "metrics": {
            name: value for name, value in record["metrics"].items() if not any(part in name for part in unsteady)
        }
    }


def test_runs_become_tables_and_a_page(script, tiny_arguments):
    asked = [text for text in tiny_arguments if not text.startswith("budget=")]
    assert script("run", "-m", *asked, "budget=24,40", "press=ams,topk", "task.num_samples=2").status == 0
    outcome = script("report", "runs")
    assert outcome.status == 0, outcome.err
    assert (
        "ams tova segment_quota" in outcome.out
        and "topk tova global_topk" in outcome.out
        and "40 tokens" in outcome.out
    )
    with Path("runs/report/summary.csv").open() as file:
        kl = [line for line in csv.DictReader(file) if line["metric"] == "kl"]
    assert len(kl) == 4 and {line["n"] for line in kl} == {"2"}
    page = Path("runs/report/report.html").read_text()
    assert "Kept positions, layer 1" in page and "segments and their quotas" in page
    # The report's own folder is no run.
    assert script("report", "runs").status == 0 and "left out" not in script("report", "runs").err


def test_shards_are_merged_to_what_the_undivided_run_is(script, tiny_arguments):
    shards = ("-m", *tiny_arguments, "task.shard=0,1", "task.num_shards=2", "output_dir=divided")
    assert script("run", *shards).status == 0
    assert script("run", *tiny_arguments).status == 0
    (merged,), problems = find_runs([Path("divided")])
    (whole,), _ = find_runs([Path("runs")])
    assert not problems and merged.config == whole.config
    assert list(map(unsteady_apart, merged.records)) == list(map(unsteady_apart, whole.records))
    for name in ("kl", "nll", "accuracy", "events", "kv_bytes"):
        assert merged.summary["metrics"][name] == whole.summary["metrics"][name], name


def test_nothing_to_report_is_an_error(script):
    Path("empty").mkdir()
    outcome = script("report", "empty")
    assert outcome.status == 1 and "error: no finished run in empty" in outcome.err
    outcome = script("report", "nowhere")
    assert outcome.status == 1 and "error: nowhere is not a folder of runs" in outcome.err
