"""The loop of a run: samples that are not finished yet are evaluated one by one, recorded, and summed up at the end."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstitch.evaluation.baseline import DenseBaselines
from kvstitch.evaluation.closed_loop import closed_loop_sample, prefilled_but
from kvstitch.evaluation.compactions import save_arrays, save_kept_positions
from kvstitch.evaluation.environment import peak_memory, reset_peak_memory
from kvstitch.evaluation.first_sample import FIRST_SAMPLE, sample_text
from kvstitch.evaluation.generate import Sampling, generate_sample
from kvstitch.evaluation.kvpress_rows import KVPressBaseline, kvpress_sample
from kvstitch.evaluation.metrics import NonFiniteLogits
from kvstitch.evaluation.models import LoadedModel, max_positions, stop_token_ids
from kvstitch.evaluation.options import check_choice
from kvstitch.evaluation.plots import KEPT_POSITIONS
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import METRICS, REGIONS, RunError, RunFolder, write_text
from kvstitch.evaluation.replay import replay_sample
from kvstitch.evaluation.results import SampleResult, failed_record
from kvstitch.evaluation.summary import summary
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.presses import EvictionPress, RetrievalPress

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
        mode: "replay" feeds the trace teacher-forced, "generate" lets the model write; see the modules of that name, and
            `closed_loop` for the replay of a retrieving press.
        interval: tokens between events of the press; replay feeds the trace in steps of it. Retrieval has none.
        decode_tokens: with a retrieving press, replay prefills all of a sample but its last so many tokens, which are
            decoded one by one; None leaves the sample as the task splits it.
        speed_tokens: decode steps that replay times at the end of each trace; 0 leaves it out.
        sampling: how generate draws.
        seed: of everything that is drawn.
        shard: this run's part of the samples, `shard`, `shard + num_shards`, …
        num_shards: runs that share the samples.
    """

    press: EvictionPress | RetrievalPress | KVPressBaseline | None
    task: Task
    mode: str = "replay"
    interval: int = 512
    decode_tokens: int | None = 128
    speed_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 42
    shard: int = 0
    num_shards: int = 1

    def __post_init__(self):
        check_choice("mode", self.mode, MODES)
        for name, least in (
            ("interval", 1),
            ("decode_tokens", 1),
            ("speed_tokens", 0),
            ("seed", 0),
            ("shard", 0),
            ("num_shards", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "decode_tokens":
                continue
            name = f"task.{name}" if "shard" in name else name
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
            if value >= 2**63:
                raise ValueError(f"{name} must be below 2**63, got {value!r}")

        if isinstance(self.press, KVPressBaseline) and self.sampling.do_sample:
            raise ValueError("press=kvpress answers greedily; set sampling.do_sample=false")
        if self.shard >= self.num_shards:
            raise ValueError(
                f"task.shard must be below task.num_shards={self.num_shards}, got {self.shard}; shards count from 0"
            )
        if isinstance(self.press, EvictionPress) and self.press.interval != self.interval:
            raise ValueError(
                f"interval={self.interval} and press.interval={self.press.interval} differ: replay would cut the trace "
                "between the press's events; set interval alone"
            )

    @property
    def num_samples(self) -> int | None:
        """How many samples this shard has; None if the task does not know."""
        total = self.task.num_samples
        return total if total is None else len(range(self.shard, total, self.num_shards))

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """The samples of this shard, in the task's order."""
        every = self.task.samples(loaded.tokenizer, max_positions(loaded.model))
        return itertools.islice(every, self.shard, None, self.num_shards)

    def baselines(self, folder: Path, loaded: LoadedModel) -> DenseBaselines:
        """Records of the dense side that any press evaluated in this way can use."""
        settings: dict[str, Any] = {"mode": self.mode}
        # What ends an answer is no parameter of the model, and not in its configuration.
        stops = {"stop_token_ids": stop_token_ids(loaded)}
        if isinstance(self.press, KVPressBaseline):
            # Whatever the mode: the context in one piece, then the questions.
            settings = {"mode": "context"}
        elif self.mode == "generate":
            settings |= {"sampling": dataclasses.asdict(self.sampling), "seed": self.seed}
        elif isinstance(self.press, RetrievalPress):
            settings = {"mode": "closed_loop", "speed_tokens": self.speed_tokens}
        else:
            settings |= {"interval": self.interval, "speed_tokens": self.speed_tokens}
        return DenseBaselines(folder, loaded.model, settings | stops)

    def evaluate(self, loaded: LoadedModel, sample: Sample, baselines: DenseBaselines | None = None) -> SampleResult:
        """One sample through the pressed and the dense model."""
        if isinstance(self.press, KVPressBaseline):
            return kvpress_sample(loaded, self.press, self.task, sample, baselines=baselines)
        if self.mode == "generate":
            return generate_sample(
                loaded, self.press, self.task, sample, sampling=self.sampling, seed=self.seed, baselines=baselines
            )
        if isinstance(self.press, RetrievalPress):
            sample = sample if self.decode_tokens is None else prefilled_but(sample, self.decode_tokens)
            return closed_loop_sample(
                loaded, self.press, self.task, sample, speed_tokens=self.speed_tokens, baselines=baselines
            )
        return replay_sample(
            loaded,
            self.press,
            self.task,
            sample,
            interval=self.interval,
            speed_tokens=self.speed_tokens,
            baselines=baselines,
        )


def run_evaluation(
    evaluation: Evaluation,
    load_model: Callable[[], LoadedModel],
    folder: RunFolder,
    labels: Mapping[str, Any],
    progress: Progress,
    dense_folder: Path | None = None,
) -> dict[str, Any]:
    """Evaluate what the opened run folder lacks; a finished run is only read.

    Args:
        evaluation: what is done with each sample.
        load_model: called only if there is something to do.
        folder: opened by the caller.
        labels: names of the parts, for the table; written into `metrics.json`.
        progress: told about every sample.
        dense_folder: where dense baselines are read and kept; None computes them in every run.

    Returns:
        The content of `metrics.json`.

    Raises:
        RunError: an undivided task gave no sample.
        OSError, ValueError: files of the task that cannot be used, before the model is loaded.
        KeyboardInterrupt: what was finished stays recorded.
    """
    finished = folder.read_json(METRICS)
    if finished is not None:
        return finished
    records = folder.read_records()
    evaluation.task.check_source()
    progress.note("loading the model")
    loaded = load_model()
    _seed_everything(evaluation.seed)
    progress.start(evaluation.num_samples, records)
    done = {record["id"] for record in records}
    baselines = None if dense_folder is None else evaluation.baselines(dense_folder, loaded)
    try:
        for sample in evaluation.samples(loaded):
            if sample.id not in done:
                if len(records) == len(done):
                    # Of the others it is known from the first how long they take.
                    beside = "" if evaluation.press is None else ", pressed and dense"
                    progress.note(f"first sample{beside}: {sample.id}, {sample.context_tokens:,} tokens")
                records.append(_evaluate_and_record(evaluation, loaded, sample, folder, baselines))
                progress.advance(records)
    finally:
        progress.close()
    if not records and evaluation.num_shards == 1:
        # A shard may be empty: there can be more workers than samples.
        raise RunError("the task gave no sample; see task.num_samples and task.path")
    metrics = summary(records, labels, evaluation.task.skipped)
    folder.write_json(METRICS, metrics)
    return metrics


def _evaluate_and_record(
    evaluation: Evaluation,
    loaded: LoadedModel,
    sample: Sample,
    folder: RunFolder,
    baselines: DenseBaselines | None,
) -> dict[str, Any]:
    shown = folder.path / FIRST_SAMPLE
    if not shown.exists():
        write_text(shown, sample_text(sample, loaded.tokenizer))
    reset_peak_memory()
    try:
        result = evaluation.evaluate(loaded, sample, baselines)
    except NonFiniteLogits as error:
        record = failed_record(sample, str(error))
    else:
        record = result.record
        # Of both sides together, where the mode could not tell them apart.
        record["metrics"] = dict(peak_memory()) | record["metrics"]
        kept, regions = folder.path / KEPT_POSITIONS, folder.path / REGIONS
        if result.events and not kept.exists():
            save_kept_positions(kept, sample.id, result.events)
        if result.regions and not regions.exists():
            save_arrays(regions, result.regions)
    folder.append(record)
    return record


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
