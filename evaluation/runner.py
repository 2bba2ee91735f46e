"""The loop of a run: samples that are not finished yet are evaluated one by one, recorded, and summed up at the end."""

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvstitch.evaluation.compactions import save_kept_positions
from kvstitch.evaluation.generate import Sampling, generate_sample
from kvstitch.evaluation.metrics import NonFiniteLogits, summarise
from kvstitch.evaluation.models import LoadedModel, max_positions
from kvstitch.evaluation.plots import KEPT_POSITIONS
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import METRICS, RunError, RunFolder
from kvstitch.evaluation.replay import replay_sample
from kvstitch.evaluation.results import SampleResult, failed_record
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.presses import EvictionPress

MODES = ("replay", "generate")


def no_press() -> None:
    """`press=dense`: the model as it is."""
    return None


@dataclass(frozen=True)
class Evaluation:
    """What is done with each sample.

    Args:
        press: None evaluates the dense model alone.
        task: where samples come from and how answers are graded.
        mode: "replay" feeds the trace teacher-forced, "generate" lets the model write; see the modules of that name.
        interval: tokens between events of the press; replay feeds the trace in steps of it.
        speed_tokens: decode steps that replay times at the end of each trace; 0 leaves it out.
        sampling: how generate draws.
        seed: of everything that is drawn.
    """

    press: EvictionPress | None
    task: Task
    mode: str = "replay"
    interval: int = 512
    speed_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 42

    def __post_init__(self):
        if self.mode not in MODES:
            nearest = difflib.get_close_matches(str(self.mode), MODES, n=1, cutoff=0.3)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}{hint}")
        for name, least in (("interval", 1), ("speed_tokens", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")

        if self.press is not None and self.press.interval != self.interval:
            raise ValueError(
                f"interval={self.interval} and press.interval={self.press.interval} differ: replay would cut the trace "
                "between the press's events; set interval alone"
            )

    def evaluate(self, loaded: LoadedModel, sample: Sample) -> SampleResult:
        """One sample through the pressed and the dense model."""
        if self.mode == "generate":
            return generate_sample(loaded, self.press, self.task, sample, sampling=self.sampling, seed=self.seed)
        return replay_sample(
            loaded, self.press, self.task, sample, interval=self.interval, speed_tokens=self.speed_tokens
        )


def run_evaluation(
    evaluation: Evaluation,
    load_model: Callable[[], LoadedModel],
    folder: RunFolder,
    labels: Mapping[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Evaluate what the opened run folder lacks; a finished run is only read.

    Args:
        evaluation: what is done with each sample.
        load_model: called only if there is something to do.
        folder: opened by the caller.
        labels: names of the parts, for the table; written into `metrics.json`.
        progress: told about every sample.

    Returns:
        The content of `metrics.json`.

    Raises:
        RunError: the task gave no sample.
        KeyboardInterrupt: what was finished stays recorded.
    """
    finished = folder.read_json(METRICS)
    if finished is not None:
        return finished
    records = folder.read_records()
    loaded = load_model()
    _seed_everything(evaluation.seed)
    progress.start(evaluation.task.num_samples, records)
    done = {record["id"] for record in records}
    try:
        for sample in evaluation.task.samples(loaded.tokenizer, max_positions(loaded.model)):
            if sample.id not in done:
                records.append(_evaluate_and_record(evaluation, loaded, sample, folder))
                progress.advance(records)
    finally:
        progress.close()
    if not records:
        raise RunError("the task gave no sample; see task.num_samples and task.path")
    metrics = summary(records, labels)
    folder.write_json(METRICS, metrics)
    return metrics


def _evaluate_and_record(
    evaluation: Evaluation, loaded: LoadedModel, sample: Sample, folder: RunFolder
) -> dict[str, Any]:
    try:
        result = evaluation.evaluate(loaded, sample)
    except NonFiniteLogits as error:
        record = failed_record(sample, str(error))
    else:
        record = result.record
        kept = folder.path / KEPT_POSITIONS
        if result.events and not kept.exists():
            save_kept_positions(kept, sample.id, result.events)
    folder.append(record)
    return record


def summary(records: Sequence[Mapping[str, Any]], labels: Mapping[str, Any]) -> dict[str, Any]:
    """What `metrics.json` holds: every metric with n, mean and standard deviation over samples.

    `budget_bound` is False if no sample ever had to evict anything, None without a press.
    """
    measured = [record["metrics"] for record in records if "error" not in record]
    names = list(dict.fromkeys(name for metrics in measured for name in metrics))
    events = [metrics["events"] for metrics in measured if "events" in metrics]
    return {
        "run": dict(labels),
        "num_samples": len(records),
        "failed_samples": {record["id"]: record["error"] for record in records if "error" in record},
        "budget_bound": any(events) if events else None,
        "metrics": {name: summarise(metrics.get(name) for metrics in measured) for name in names},
    }


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
