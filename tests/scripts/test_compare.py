"""From real runs to differences sample by sample with one more command."""

import importlib.util
import statistics
from pathlib import Path

import pytest

from kvstitch.evaluation.report import find_runs
from kvstitch.evaluation.report.paired import Comparison

COMPARE = Path(__file__).parents[2] / "scripts" / "compare.py"


def test_runs_are_compared_on_their_samples(script, tiny_arguments):
    asked = [text for text in tiny_arguments if not text.startswith("budget=")]
    assert script("run", "-m", *asked, "budget=40", "press=ams,topk", "task.num_samples=2").status == 0
    outcome = script("compare", "runs", "--base", "GlobalTopK(num_recent=8)", "--markdown")
    assert outcome.status == 0, outcome.err
    line = outcome.out.splitlines()[-1]
    kl = {
        run.labels["press"]: [record["metrics"]["kl"] for record in run.records] for run in find_runs([Path("runs")])[0]
    }
    differences = [ours - base for ours, base in zip(kl["ams"], kl["topk"])]
    assert f"{round(statistics.fmean(differences), 4) + 0.0:+.4f}" in line and "of 2 |" in line


def test_whole_methods_are_compared_with_the_dense_model(script, tiny_arguments):
    asked = [text for text in tiny_arguments if not text.startswith(("budget=", "allocator."))]
    asked += ["budget=48", "task.num_samples=2", "reuse_dense=false"]
    for press in ("press=dense", "press=topk", "press=community"):
        assert script("run", press, *asked, "decode_tokens=30").status == 0
    runs, _ = find_runs([Path("runs")])
    for metric in ("accuracy", "nll", "kv_bytes"):
        outcome = script("compare", "runs", "--part", "method", "--base", "dense", "--metric", metric, "--markdown")
        assert outcome.status == 0, outcome.err
        lines = {line.split(" | ")[1]: line for line in outcome.out.splitlines()[2:]}
        names = {"topk": "EvictionPress + TOVA + GlobalTopK", "community": "RetrievalPress + CommunityRetrieval"}
        for run in runs:
            values = [(record["metrics"][metric], record["metrics"].get(f"dense_{metric}")) for record in run.records]
            if run.labels["press"] == "dense":
                continue
            if values[0][1] is None:
                assert metric == "kv_bytes" and names[run.labels["press"]] not in lines
                continue
            mean = statistics.fmean(own - dense for own, dense in values)
            form = "+,.0f" if metric == "kv_bytes" else "+.4f"
            assert f"| {mean:{form}} ± " in lines[names[run.labels["press"]]]
    outcome = script("compare", "runs", "--part", "method", "--base", "dense")
    assert outcome.status == 1 and "no sample of 'dense' has 'kl'; it has accuracy" in outcome.err
    outcome = script("compare", "runs", "--part", "method", "--base", names["topk"])
    # Both have a KL, of other tokens.
    assert outcome.status == 1 and "shares no sample or compared token with another method" in outcome.err


def test_what_cannot_be_compared_is_one_message(script, tmp_path):
    outcome = script("compare", "absent", "--base", "GlobalTopK")
    assert outcome.status == 1 and "absent" in outcome.err and "Traceback" not in outcome.err
    (tmp_path / "empty").mkdir()
    outcome = script("compare", str(tmp_path / "empty"), "--base", "GlobalTopK")
    assert outcome.status == 1 and "no run has the allocator 'GlobalTopK'; there are none" in outcome.err


@pytest.mark.parametrize(
    "size, difference, written",
    [
        (0.5, -1e-6, "+0.0000"),
        (0.5, 1e-6, "+0.0000"),
        (0.5, -2e-4, "-0.0002"),
        (5e6, -0.3, "+0"),
        (5e6, -1234.4, "-1,234"),
    ],
)
def test_a_difference_that_rounds_to_nothing_has_no_minus(size, difference, written):
    spec = importlib.util.spec_from_file_location("kvstitch_script_compare", COMPARE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = Comparison("TOVA", "x", base=size, mean=size + difference, difference=difference, error=None, lower=1, n=1)
    assert module._cells(row)[4] == written
