"""Grading a run again: the same scores, and every change named."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from kvstitch.evaluation.answers import answer_metrics, graded
from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.regrading import recorded_task, regrade
from kvstitch.evaluation.tasks import GSM8K, Question

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "regrade.py"
TASK = {
    "_target_": "kvstitch.evaluation.tasks.GSM8K",
    "path": "test.jsonl",
    "num_samples": 2,
    "shard": 0,
    "num_shards": 1,
}


class Spelled:
    """Decodes token ids that are characters."""

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


@pytest.fixture
def run_folder(tmp_path):
    """Two samples as a run records them: pressed right and wrong, dense right both times; a third failed."""
    task = GSM8K(path="test.jsonl")
    lines = []
    for index, texts in enumerate([(r"so \boxed{18}", "18"), ("19", r"\boxed{1} or \boxed{18}")]):
        question = Question("", (), ("18",), 1024)
        answer = {"gold": ["18"], "meta": {}}
        for side, text in zip(("pressed", "dense"), texts):
            answer[side] = graded(task, question, Spelled(), [ord(letter) for letter in text])
        lines.append(
            {"id": f"test-{index}", "meta": {}, "metrics": {"kl": 0.5} | answer_metrics([answer]), "answers": [answer]}
        )
    lines.append({"id": "test-2", "meta": {}, "error": "not finite"})
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"task": TASK}))
    return tmp_path


def test_the_same_graders_give_the_same_scores(run_folder):
    result = regrade(run_folder)
    recorded = [json.loads(line) for line in (run_folder / "predictions.jsonl").read_text().splitlines()]
    assert result.records == recorded and result.changes == []
    assert result.before == result.after == {"accuracy": 0.5, "dense_accuracy": 1.0}


def test_lines_that_the_metrics_count_and_nobody_finds_are_told(run_folder):
    (run_folder / "metrics.json").write_text(json.dumps({"num_samples": 3}))
    assert regrade(run_folder).changes == []
    (run_folder / "metrics.json").write_text(json.dumps({"num_samples": 4}))
    with pytest.raises(RunError, match="damaged: predictions.jsonl holds 3 of the 4 samples that metrics.json counts"):
        regrade(run_folder)


def test_nothing_is_written_not_even_over_a_torn_line(run_folder):
    path = run_folder / "predictions.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "test-3", "metr')
    before = {file.name: file.read_bytes() for file in run_folder.iterdir()}
    assert [record["id"] for record in regrade(run_folder).records] == ["test-0", "test-1", "test-2"]
    assert {file.name: file.read_bytes() for file in run_folder.iterdir()} == before


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.yaml", "task: [", "config.yaml is damaged"),
        ("config.yaml", "budget: 3", "task._target_=None is not a task of kvstitch"),
        ("predictions.jsonl", '{"id": "a"}\n', "sample 'a' has no answers and metrics"),
    ],
)
def test_a_damaged_folder_is_named(run_folder, name, content, message):
    (run_folder / name).write_text(content)
    with pytest.raises(RunError, match=message):
        regrade(run_folder)


def test_a_score_that_was_wrong_is_named(run_folder):
    path = run_folder / "predictions.jsonl"
    path.write_text(path.read_text().replace('"score": 0.0', '"score": 1.0'))
    result = regrade(run_folder)
    (change,) = result.changes
    assert (change.sample, change.answer, change.side, change.before, change.after) == (
        "test-1",
        0,
        "pressed",
        1.0,
        0.0,
    )
    assert result.after["accuracy"] == 0.5 and result.records[1]["metrics"]["kl"] == 0.5


def test_the_task_is_that_of_the_configuration(run_folder):
    task = recorded_task(run_folder)
    assert isinstance(task, GSM8K) and task.path == "test.jsonl" and task.num_samples == 2
    for target, message in (
        ("os.path.join", "is not a task of kvstitch"),
        ("kvstitch.evaluation.tasks.Gone", "any more"),
    ):
        (run_folder / "config.yaml").write_text(yaml.safe_dump({"task": {"_target_": target}}))
        with pytest.raises(RunError, match=message):
            recorded_task(run_folder)
    with pytest.raises(RunError, match=r"is no run folder: it has no config\.yaml"):
        regrade(run_folder / "absent")


def test_the_script_says_what_changed(run_folder, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("kvstitch_script_regrade", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call = lambda *arguments: monkeypatch.setattr(sys, "argv", ["regrade.py", *arguments]) or module.main()
    assert call(str(run_folder)) == 0
    assert "dense_accuracy: 1.0000 recorded, 1.0000 now" in capsys.readouterr().out
    path = run_folder / "predictions.jsonl"
    path.write_text(path.read_text().replace('"score": 0.0', '"score": 1.0'))
    assert call(str(run_folder)) == 2
    assert "test-1, answer 0, pressed: 1 recorded, 0 now" in capsys.readouterr().out
    assert call(str(run_folder / "absent")) == 1 and "is no run folder" in capsys.readouterr().err
    # A folder of runs: one with answers, one that was refused.
    runs = tmp_path_factory.mktemp("runs")
    (runs / "refused").mkdir()
    (runs / "refused" / "config.yaml").write_text("task: {}")
    assert call(str(runs)) == 1 and "is no run folder and holds none with answers" in capsys.readouterr().err
    shutil.copytree(run_folder, runs / "graded")
    assert call(str(runs)) == 2 and capsys.readouterr().out.startswith(f"{runs / 'graded'}\n")
