"""Grade the recorded answers of a run again: with the same graders the same scores, with better ones what they change."""

import importlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstitch.evaluation.answers import answer_metrics
from kvstitch.evaluation.records import CONFIG, METRICS, PREDICTIONS, RunError, RunFolder
from kvstitch.evaluation.tasks.base import Question, Task

SIDES = ("pressed", "dense")
# Options beside the task's own: which part of its samples a run has.
_OF_THE_RUN = ("shard", "num_shards")


@dataclass(frozen=True)
class Change:
    """An answer whose score is another one now."""

    sample: str
    answer: int
    side: str
    before: float
    after: float


@dataclass(frozen=True)
class Regraded:
    """What grading again gives.

    Args:
        records: as read, with the scores and the metrics that follow from them replaced.
        before: mean of `accuracy` and of `dense_accuracy` over samples as recorded, None where a side did not run.
        after: the same from the new scores.
        changes: answers whose score changed.
    """

    records: list[dict[str, Any]]
    before: Mapping[str, float | None]
    after: Mapping[str, float | None]
    changes: list[Change]


def regrade(run_folder: Path) -> Regraded:
    """Grade every answer in `predictions.jsonl` by the task of `config.yaml`; nothing is written.

    Raises:
        RunError: no run folder, one that is damaged, or its task is not one of ours.
    """
    task = recorded_task(run_folder)
    records = RunFolder(run_folder).read_records()
    if not records:
        raise RunError(f"{run_folder} holds no finished sample")
    metrics = RunFolder(run_folder).read_json(METRICS) or {}
    if metrics.get("num_samples", len(records)) != len(records):
        raise RunError(
            f"{run_folder} is damaged: {PREDICTIONS} holds {len(records)} of the {metrics['num_samples']} samples that "
            f"{METRICS} counts"
        )
    for record in records:
        if "error" not in record and not {"answers", "metrics"} <= record.keys():
            raise RunError(f"{run_folder}: sample {record['id']!r} has no answers and metrics")
    changes: list[Change] = []
    renewed = [record if "error" in record else _renewed(task, record, changes) for record in records]
    return Regraded(renewed, _accuracy(records), _accuracy(renewed), changes)


def recorded_task(run_folder: Path) -> Task:
    """The task that a run's configuration describes.

    Raises:
        RunError: no configuration, or its task is not one of ours.
    """
    path = run_folder / CONFIG
    options = dict(RunFolder(run_folder).read_config().get("task") or {})
    target = str(options.pop("_target_", None))
    module, _, name = target.rpartition(".")
    if not module.startswith("kvstitch.evaluation.tasks"):
        raise RunError(f"{path}: task._target_={target} is not a task of kvstitch")
    kind = getattr(importlib.import_module(module), name, None)
    if kind is None:
        raise RunError(f"{path}: there is no task {target} any more")
    return kind(**{option: value for option, value in options.items() if option not in _OF_THE_RUN})


def _renewed(task: Task, record: Mapping[str, Any], changes: list[Change]) -> dict[str, Any]:
    answers = []
    for index, answer in enumerate(record["answers"]):
        question = Question("", (), tuple(answer["gold"]), task.max_new_tokens, answer["meta"])
        sides = {}
        for side in SIDES:
            if side in answer:
                score = float(task.grade(question, answer[side]["text"]))
                sides[side] = answer[side] | {"score": score}
                if score != answer[side]["score"]:
                    changes.append(Change(record["id"], index, side, answer[side]["score"], score))
        answers.append({**answer, **sides})
    return {**record, "answers": answers, "metrics": record["metrics"] | _scores(answers)}


def _scores(answers: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of what `answer_metrics` gives, that which hangs on scores."""
    return {name: value for name, value in answer_metrics(answers).items() if "accuracy" in name or "pass_at" in name}


def _accuracy(records: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in ("accuracy", "dense_accuracy"):
        values = [record["metrics"].get(name) for record in records if "error" not in record]
        known = [value for value in values if value is not None]
        means[name] = statistics.fmean(known) if known else None
    return means
