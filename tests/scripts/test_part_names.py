"""What was computed is called by its own name, wherever it came from."""

import json
import os
from pathlib import Path

import pytest

from kvstitch.evaluation.part_names import class_name, part_names

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
VALUE_NORM = """
from dataclasses import dataclass
from kvstitch.scorers import Scorer

@dataclass(frozen=True)
class ValueNorm(Scorer):
    def score(self, view):
        return view.values.float().norm(dim=-1)
"""


@pytest.fixture
def own_scorers(tmp_path, monkeypatch):
    """Two modules with a scorer of the same name, and a folder of configuration with one of them."""
    for name in ("my_norms", "your_norms"):
        (tmp_path / f"{name}.py").write_text(VALUE_NORM)
    options = tmp_path / "options"
    (options / "scorer").mkdir(parents=True)
    (options / "scorer" / "outside.yaml").write_text("_target_: my_norms.ValueNorm\n")
    monkeypatch.syspath_prepend(tmp_path)
    return options


def only_run(directory):
    (folder,) = [path for path in Path(directory).iterdir() if not path.name.startswith(".")]
    return folder.name, json.loads((folder / "metrics.json").read_text())["run"]


def test_a_scorer_in_the_place_of_another_goes_by_its_own_name(script, tiny_arguments, own_scorers):
    common = [*tiny_arguments, "task.num_samples=1"]
    outcome = script("run", *common, "~scorer.share", "scorer._target_=my_norms.ValueNorm")
    assert outcome.status == 0, outcome.err
    name, labels = only_run("runs")
    assert name.startswith("jsonl-ams-my_norms.ValueNorm-40-") and labels["scorer"] == "my_norms.ValueNorm"
    assert "scorer=my_norms.ValueNorm" in outcome.out and "tova" not in outcome.out

    outcome = script("run", *common, "scorer=keynorm", "scorer._target_=kvstitch.scorers.KeyDiff", "output_dir=ours")
    assert outcome.status == 0, outcome.err
    name, labels = only_run("ours")
    assert name.startswith("jsonl-ams-KeyDiff-40-") and labels["scorer"] == "KeyDiff"


def test_a_scorer_of_a_folder_of_ones_own(script, tiny_arguments, own_scorers):
    """As the README says: `--config-dir` beside the module on PYTHONPATH."""
    outside = ["--config-dir", os.path.relpath(own_scorers), "scorer=outside"]
    outcome = script("run", *outside, *tiny_arguments, "task.num_samples=1")
    assert outcome.status == 0, outcome.err
    assert only_run("runs")[1]["scorer"] == "outside"
    other = [
        *outside,
        *tiny_arguments,
        "task.num_samples=1",
        "scorer._target_=your_norms.ValueNorm",
        "output_dir=other",
    ]
    assert script("run", *other).status == 0
    assert only_run("other")[1]["scorer"] == "your_norms.ValueNorm"


def test_allocator_and_press_likewise(script, tiny_arguments):
    changed = ["allocator=global_topk", "allocator._target_=kvstitch.allocators.FixedSegments", "press=topk"]
    outcome = script("run", *tiny_arguments, *changed, "task.num_samples=1")
    assert outcome.status == 0, outcome.err
    assert only_run("runs")[1] | {"press": "topk", "allocator": "FixedSegments"} == only_run("runs")[1]
    nothing = ["press=dense", "press._target_=kvstitch.evaluation.runner.no_press"]
    dense = [text for text in tiny_arguments if not text.startswith("allocator.")]
    assert script("run", *dense, *nothing, "task.num_samples=1", "output_dir=dense").status == 0
    assert only_run("dense")[1]["press"] == "dense"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("kvstitch.scorers.TOVA", "TOVA"),
        ("kvstitch.allocators.retrieval.CommunityRetrieval.paper", "CommunityRetrieval.paper"),
        ("kvstitch.evaluation.runner.no_press", "no_press"),
        ("kvstitchery.TOVA", "kvstitchery.TOVA"),
        ("mine.deep.ValueNorm", "mine.deep.ValueNorm"),
    ],
)
def test_a_class_of_ours_needs_no_module(target, name):
    assert class_name(target) == name


def test_an_option_without_a_target_of_its_own_is_that_of_the_one_it_changes(tmp_path):
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "shared.yaml").write_text("defaults:\n  - tova\n  - _self_\nshare: layer\n")
    choices = {"scorer": "shared", "press": "topk", "hydra/output": "default"}
    plain = {"scorer": {"_target_": "kvstitch.scorers.TOVA"}, "budget": 1}
    assert part_names(choices, plain, [CONFIGS, tmp_path]) == choices
    plain["scorer"]["_target_"] = "kvstitch.scorers.KeyDiff"
    assert part_names(choices, plain, [CONFIGS, tmp_path]) == choices | {"scorer": "KeyDiff"}
    # Nothing is known of an option whose file is not there.
    assert part_names(choices, plain, []) == choices


def test_two_of_one_name_are_two_choices(script, tiny_arguments, own_scorers):
    common = [*tiny_arguments, "task.num_samples=1", "~scorer.share"]
    for module in ("my_norms", "your_norms"):
        assert script("run", *common, f"scorer._target_={module}.ValueNorm").status == 0
    outcome = script("compare", "runs", "--part", "scorer", "--base", "my_norms.ValueNorm", "--markdown")
    assert outcome.status == 0 and "| your_norms.ValueNorm |" in outcome.out, outcome.err
