"""From real runs to differences sample by sample with one more command."""

import statistics
from pathlib import Path

from kvstitch.evaluation.report import find_runs


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
    assert f"{statistics.fmean(differences):+.4f}" in line and "of 2 |" in line


def test_what_cannot_be_compared_is_one_message(script, tmp_path):
    outcome = script("compare", "absent", "--base", "GlobalTopK")
    assert outcome.status == 1 and "absent" in outcome.err and "Traceback" not in outcome.err
    (tmp_path / "empty").mkdir()
    outcome = script("compare", str(tmp_path / "empty"), "--base", "GlobalTopK")
    assert outcome.status == 1 and "no run has the allocator 'GlobalTopK'; there are none" in outcome.err
