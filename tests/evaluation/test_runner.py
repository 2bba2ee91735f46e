"""The loop: resume at the sample, nothing done twice, failures named, sums right."""

import json
import math
from io import StringIO

import pytest
import torch

from kvstitch.evaluation.environment import recorded_session
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import METRICS, RunError, RunFolder
from kvstitch.evaluation.runner import Evaluation, run_evaluation, summary

LABELS = {"press": "ams", "mode": "replay"}
NAMES = ("a", "b", "c")


@pytest.fixture
def evaluation(make_press, make_sample, make_task):
    samples = [make_sample(name) for name in NAMES]
    return Evaluation(make_press(), make_task(samples), interval=16, speed_tokens=0, seed=7)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(""):
        yield folder


def run(evaluation, tiny, folder, progress=None):
    return run_evaluation(evaluation, lambda: tiny, folder, LABELS, progress or Progress(StringIO()))


def without_times(record):
    unsteady = ("second", "time", "peak_process")
    metrics = {name: value for name, value in record["metrics"].items() if not any(part in name for part in unsteady)}
    return record | {"metrics": metrics}


def test_metrics_are_means_over_the_records(evaluation, tiny, folder):
    metrics = run(evaluation, tiny, folder)
    records = folder.read_records()
    assert [record["id"] for record in records] == list(NAMES)
    kl = [record["metrics"]["kl"] for record in records]
    mean = sum(kl) / 3
    std = math.sqrt(sum((value - mean) ** 2 for value in kl) / 2)
    assert metrics["metrics"]["kl"] == {"n": 3, "mean": pytest.approx(mean), "std": pytest.approx(std)}
    assert metrics["num_samples"] == 3 and metrics["failed_samples"] == {} and metrics["run"] == LABELS
    assert metrics["budget_bound"] is True
    assert metrics == folder.read_json(METRICS) == json.loads((folder.path / METRICS).read_text())
    assert (folder.path / "kept_positions.npz").exists()


def test_samples_do_not_depend_on_their_order(evaluation, tiny, folder, tmp_path, make_sample, make_task):
    run(evaluation, tiny, folder)
    turned = Evaluation(evaluation.press, make_task([make_sample(name) for name in "cab"]), interval=16, speed_tokens=0)
    other = RunFolder(tmp_path / "other")
    with other.opened(""):
        run(turned, tiny, other)
        by_id = {record["id"]: without_times(record) for record in other.read_records()}
    assert [by_id[record["id"]] for record in folder.read_records()] == [
        without_times(r) for r in folder.read_records()
    ]


class InterruptedAfter(Progress):
    """Ctrl-C while the sample after `count` recorded ones is evaluated."""

    def __init__(self, count):
        super().__init__(StringIO())
        self.count = count

    def advance(self, records):
        super().advance(records)
        if len(records) == self.count:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_at_the_sample(evaluation, tiny, folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(evaluation, tiny, folder, InterruptedAfter(2))
    kept = folder.predictions.read_bytes()
    assert kept.count(b"\n") == 2 and not (folder.path / METRICS).exists()
    output = StringIO()
    metrics = run(evaluation, tiny, folder, Progress(output))
    assert folder.predictions.read_bytes().startswith(kept)
    assert "resuming: 2 samples are finished already" in output.getvalue() and "[3/3] c:" in output.getvalue()
    whole = RunFolder(tmp_path / "whole")
    with whole.opened(""):
        expected = run(evaluation, tiny, whole)
    assert [without_times(r) for r in folder.read_records()] == [without_times(r) for r in whole.read_records()]
    assert metrics["metrics"]["kl"] == expected["metrics"]["kl"]


def test_a_finished_run_is_only_read(evaluation, tiny, folder):
    metrics = run(evaluation, tiny, folder)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}

    def refuse():
        raise AssertionError("the model was loaded again")

    assert run_evaluation(evaluation, refuse, folder, LABELS, Progress(StringIO())) == metrics
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_sample_with_nan_logits_is_named_and_the_others_go_on(tiny, folder, make_press, make_sample, make_task):
    good, bad = make_sample("good"), make_sample("bad")
    poison = next(token for token in bad.trace_ids if token not in good.prompt_ids + good.trace_ids + (5, 7, 8))
    # Weights are tied to nothing: only a sample that feeds this token meets the NaN.
    tiny.model.model.embed_tokens.weight.data[poison] = math.nan
    output = StringIO()
    task = make_task([bad, good])
    metrics = run(Evaluation(make_press(), task, interval=16, speed_tokens=0), tiny, folder, Progress(output))
    assert list(metrics["failed_samples"]) == ["bad"] and "not finite" in metrics["failed_samples"]["bad"]
    assert metrics["num_samples"] == 2 and metrics["metrics"]["kl"]["n"] == 1
    assert "bad: failed:" in output.getvalue() and "[2/2] good:" in output.getvalue()


def test_a_budget_that_never_bound_is_flagged(tiny, folder, make_press, make_sample, make_task):
    task = make_task([make_sample("a")])
    metrics = run(Evaluation(make_press(budget=500), task, interval=16, speed_tokens=0), tiny, folder)
    assert metrics["budget_bound"] is False and not (folder.path / "kept_positions.npz").exists()


def test_dense_alone_binds_nothing(tiny, folder, make_sample, make_task):
    metrics = run(Evaluation(None, make_task([make_sample("a")]), interval=16, speed_tokens=0), tiny, folder)
    assert metrics["budget_bound"] is None and metrics["metrics"]["dense_nll"]["n"] == 1
    assert metrics["metrics"]["nll"] == {"n": 0, "mean": None, "std": None}


def test_generate_mode_runs_through_the_same_loop(tiny, folder, make_press, make_sample, make_task):
    evaluation = Evaluation(make_press(), make_task([make_sample("a")]), mode="generate", interval=16)
    metrics = run(evaluation, tiny, folder)
    assert metrics["metrics"]["dense_accuracy"]["n"] == 1 and "kl" not in metrics["metrics"]


def test_a_task_without_samples_is_an_error(tiny, folder, make_press, make_task, make_sample):
    task = make_task([make_sample("a")])
    object.__setattr__(task, "items", ())
    with pytest.raises(RunError, match="no sample"):
        run(Evaluation(make_press(), task, interval=16), tiny, folder)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "replya"}, r"mode must be one of replay, generate, got 'replya'; did you mean 'replay'\?"),
        ({"interval": 0}, "interval must be a whole number of at least 1, got 0"),
        ({"interval": 2.5}, "interval must be a whole number of at least 1, got 2.5"),
        ({"speed_tokens": -1}, "speed_tokens must be a whole number of at least 0, got -1"),
        ({"seed": "x"}, "seed must be a whole number of at least 0, got 'x'"),
    ],
)
def test_impossible_values_are_refused(options, message, make_task, make_sample):
    with pytest.raises(ValueError, match=message):
        Evaluation(None, make_task([make_sample("a")]), **options)


def test_metrics_missing_in_some_samples_are_averaged_over_the_others():
    records = [{"id": "a", "metrics": {"kl": 1.0}}, {"id": "b", "metrics": {"kl": None, "events": 0}}]
    assert summary(records, {})["metrics"] == {
        "kl": {"n": 1, "mean": 1.0, "std": None},
        "events": {"n": 1, "mean": 0.0, "std": None},
    }


def test_a_run_states_its_seed_and_that_it_has_no_spread_over_several():
    made = summary([{"id": "a", "metrics": {"kl": 1.0}}], {"seed": 7})
    assert (made["seeds"], made["spread_over_seeds"]) == ([7], None)


def test_sessions_are_added_and_tell_how_they_ended(folder):
    with recorded_session(folder, seed=7):
        assert "ended" not in folder.read_json("run_meta.json")["sessions"][0]
    with pytest.raises(KeyboardInterrupt):
        with recorded_session(folder, seed=7):
            raise KeyboardInterrupt
    first, second = folder.read_json("run_meta.json")["sessions"]
    assert (first["outcome"], second["outcome"]) == ("finished", "KeyboardInterrupt")
    assert first["seed"] == 7 and first["versions"]["torch"] == torch.__version__ and first["command"]
    assert first["hardware"]["cores"] >= 1 and first["peak_process_bytes"] > 2**20
