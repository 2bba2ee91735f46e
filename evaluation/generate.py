"""Generate: answers written by `model.generate`, with the press and without, graded."""

import hashlib
import itertools
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvstitch.evaluation.answers import answer_metrics, graded
from kvstitch.evaluation.baseline import DenseBaselines, DenseRecord
from kvstitch.evaluation.compactions import event_metrics
from kvstitch.evaluation.dense_side import storage_metrics
from kvstitch.evaluation.environment import peak_memory, reset_peak_memory
from kvstitch.evaluation.kept_bytes import KeptBytes
from kvstitch.evaluation.metrics import NonFiniteLogits
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.options import check_least, check_types
from kvstitch.evaluation.reads import index_metrics
from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.results import SampleResult, make_record
from kvstitch.evaluation.streams import Storage, now
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.presses import EvictionPress, RetrievalPress


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; greedy unless `do_sample`.

    Args:
        do_sample: draw instead of taking the most likely token.
        temperature: divides the logits; above 0. Like the other two only read with `do_sample`.
        top_p: smallest set of tokens with this much probability, in (0, 1].
        top_k: at most so many tokens; 0 leaves it out.
        samples_per_question: answers drawn for each question; accuracy is then pass@1 over all of them.
    """

    do_sample: bool = False
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    samples_per_question: int = 1

    def __post_init__(self):
        check_types(self, "sampling")
        check_least(self, "sampling", {"top_k": 0, "samples_per_question": 1})
        if not self.temperature > 0:
            raise ValueError(f"sampling.temperature must be above 0, got {self.temperature}; write sampling.do_sample=false "
                             "for greedy decoding")  # fmt: skip
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1], got {self.top_p}")
        if self.samples_per_question > 1 and not self.do_sample:
            raise ValueError(
                f"sampling.samples_per_question={self.samples_per_question} needs sampling.do_sample=true: greedy answers are "
                "all the same"
            )

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a `GenerationConfig`."""
        if not self.do_sample:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


def generate_sample(
    loaded: LoadedModel,
    press: EvictionPress | RetrievalPress | None,
    task: Task,
    sample: Sample,
    *,
    sampling: Sampling,
    seed: int,
    baselines: DenseBaselines | None = None,
) -> SampleResult:
    """Every question of a sample answered with the press and without; a drawn answer depends on seed, sample and question.

    Args:
        loaded: model and tokenizer.
        press: None runs the dense model alone.
        task: grades the answers.
        sampling: greedy or drawn.
        seed: of the drawing; both sides draw with the same one.
        baselines: where the dense answers are read, and kept if they are not there yet; None generates them every time.

    Raises:
        RunError: a sample without questions.
        NonFiniteLogits: NaN in the logits of either side.
    """
    if not sample.questions:
        raise RunError(f"sample {sample.id!r} asks nothing, so there is nothing to generate; use mode=replay")
    with nullcontext() if baselines is None else baselines.once(sample) as known:
        answers, measured, dense_answers, dense_measured, events = [], [], [], [], []
        draws = sampling.samples_per_question
        for index, (number, again) in enumerate(itertools.product(range(len(sample.questions)), range(draws))):
            question = sample.questions[number]
            prompt = sample.input_ids(question)
            draw = _seed(seed, sample.id, number, again)
            answer: dict[str, Any] = {"gold": list(question.gold), "meta": dict(question.meta)}
            if draws > 1:
                answer |= {"question": number, "draw": again}
            numbers: dict[str, float | None] = {}
            if press is not None:
                # What retrieval attends to is another matter, and it evicts nothing.
                storage = Storage(kept=None if isinstance(press, RetrievalPress) else KeptBytes())
                with press(loaded.model) as run:
                    tokens, numbers = _generate(loaded, prompt, question, sampling, draw, storage)
                answer["pressed"] = graded(task, question, loaded.tokenizer, tokens)
                if isinstance(press, RetrievalPress):
                    numbers |= index_metrics(run)
                else:
                    events = list(run.events)
                    numbers |= event_metrics(events, len(run.stored_tokens)) | storage.kept.metrics()
                numbers["event_time_share"] = run.event_seconds / numbers["seconds"]
            if known is None:
                tokens, dense = _generate(loaded, prompt, question, sampling, draw, Storage())
                dense_answers.append(tokens)
                dense_measured.append({f"dense_{name}": value for name, value in dense.items()})
            else:
                tokens = known.answers[index]
            answer["dense"] = graded(task, question, loaded.tokenizer, tokens)
            answers.append(answer)
            measured.append(numbers)
        dense_numbers = _mean_of_each(dense_measured) if known is None else known.numbers
        if baselines is not None and known is None:
            baselines.write(sample, DenseRecord(dense_numbers, dense_answers))
        metrics = (
            answer_metrics(answers)
            | _mean_of_each(measured)
            | dense_numbers
            | {"dense_reused": float(known is not None)}
        )
        return SampleResult(make_record(sample, metrics, answers), events)


def _generate(
    loaded: LoadedModel, prompt: Sequence[int], question: Question, sampling: Sampling, draw: int, storage: Storage
) -> tuple[list[int], dict[str, float | None]]:
    """New tokens without the one that ended the answer, and what it took; `storage` takes in what was stored."""
    model, stop_ids = loaded.model, stop_token_ids(loaded)
    ids = torch.tensor([list(prompt)], device=model.device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    config = GenerationConfig(
        max_new_tokens=question.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=loaded.tokenizer.pad_token_id,
        **sampling.options(),
    )
    meter = _Meter(cache, storage)
    torch.manual_seed(draw)
    reset_peak_memory()
    start = now(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        generation_config=config,
        logits_processor=LogitsProcessorList([_RefuseNaN()]),
        stopping_criteria=StoppingCriteriaList([meter]),
    )
    tokens = output[0, ids.shape[1] :].tolist()
    end = now(model.device)
    numbers = {
        "seconds": end - start,
        "prefill_seconds": meter.first_token - start,
        "decode_tokens_per_second": (len(tokens) - 1) / (end - meter.first_token) if len(tokens) > 1 else None,
        **storage_metrics("", storage),
        **peak_memory(),
    }
    return tokens[:-1] if tokens[-1] in stop_ids else tokens, numbers


class _RefuseNaN(LogitsProcessor):
    """Drawing from NaN fails obscurely, and the most likely token among NaN is the first one of the vocabulary."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise NonFiniteLogits(f"the logits after {input_ids.shape[1]} tokens hold NaN")
        return scores


class _Meter(StoppingCriteria):
    """Never stops anything; called after every token, it notes when the first one was there and what the cache stores."""

    def __init__(self, cache: DynamicCache, storage: Storage):
        self.first_token: float | None = None
        self._cache = cache
        self._storage = storage

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        after_prompt = self.first_token is not None
        if not after_prompt:
            self.first_token = now(input_ids.device)
        self._storage.measure(self._cache, tokens=1 if after_prompt else 0)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _seed(seed: int, sample_id: str, question: int, draw: int) -> int:
    digest = hashlib.sha256(f"{seed}:{sample_id}:{question}:{draw}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _mean_of_each(measured: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in measured[0]:
        values = [numbers[name] for numbers in measured if numbers[name] is not None]
        means[name] = statistics.fmean(values) if values else None
    return means
