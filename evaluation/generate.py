"""Generate: answers written by `model.generate`, with the press and without, graded."""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from kvstitch.evaluation.answers import answer_metrics, graded
from kvstitch.evaluation.compactions import event_metrics
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.results import SampleResult, make_record
from kvstitch.evaluation.streams import Storage, now
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.presses import EvictionPress


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; greedy unless `do_sample`.

    Args:
        do_sample: draw instead of taking the most likely token.
        temperature: divides the logits; above 0. Like the other two only read with `do_sample`.
        top_p: smallest set of tokens with this much probability, in (0, 1].
        top_k: at most so many tokens; 0 leaves it out.
    """

    do_sample: bool = False
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0

    def __post_init__(self):
        if not isinstance(self.do_sample, bool):
            raise TypeError(f"sampling.do_sample must be true or false, got {self.do_sample!r}")
        if not self.temperature > 0:
            raise ValueError(f"sampling.temperature must be above 0, got {self.temperature}; write sampling.do_sample=false "
                             "for greedy decoding")  # fmt: skip
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1], got {self.top_p}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"sampling.top_k must be a whole number of at least 0, got {self.top_k!r}")

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a `GenerationConfig`."""
        if not self.do_sample:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


def generate_sample(
    loaded: LoadedModel, press: EvictionPress | None, task: Task, sample: Sample, *, sampling: Sampling, seed: int
) -> SampleResult:
    """Every question of a sample answered with the press and without; a drawn answer depends on seed, sample and question.

    Args:
        loaded: model and tokenizer.
        press: None runs the dense model alone.
        task: grades the answers.
        sampling: greedy or drawn.
        seed: of the drawing; both sides draw with the same one.

    Raises:
        RunError: a sample without questions.
    """
    if not sample.questions:
        raise RunError(f"sample {sample.id!r} asks nothing, so there is nothing to generate; use mode=replay")
    answers, measured, events = [], [], []
    for index, question in enumerate(sample.questions):
        prompt = sample.input_ids(question)
        draw = _seed(seed, sample.id, index)
        answer: dict[str, Any] = {"gold": list(question.gold), "meta": dict(question.meta)}
        numbers: dict[str, float | None] = {}
        if press is not None:
            with press(loaded.model) as run:
                tokens, numbers = _generate(loaded, prompt, question, sampling, draw)
            answer["pressed"] = graded(task, question, loaded.tokenizer, tokens)
            events = list(run.events)
            share = run.event_seconds / numbers["seconds"]
            numbers |= event_metrics(events, len(run.stored_tokens)) | {"event_time_share": share}
        tokens, dense = _generate(loaded, prompt, question, sampling, draw)
        answer["dense"] = graded(task, question, loaded.tokenizer, tokens)
        numbers |= {f"dense_{name}": value for name, value in dense.items()}
        answers.append(answer)
        measured.append(numbers)
    metrics = answer_metrics(answers) | _mean_of_each(measured)
    return SampleResult(make_record(sample, metrics, answers), events)


def _generate(
    loaded: LoadedModel, prompt: Sequence[int], question: Question, sampling: Sampling, draw: int
) -> tuple[list[int], dict[str, float | None]]:
    """New tokens without the one that ended the answer, and what it took."""
    model, stop_ids = loaded.model, stop_token_ids(loaded)
    ids = torch.tensor([list(prompt)], device=model.device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    config = GenerationConfig(
        max_new_tokens=question.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=loaded.tokenizer.pad_token_id,
        **sampling.options(),
    )
    meter = _Meter(cache)
    torch.manual_seed(draw)
    start = now(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([meter]),
    )
    tokens = output[0, ids.shape[1] :].tolist()
    end = now(model.device)
    numbers = {
        "seconds": end - start,
        "prefill_seconds": meter.first_token - start,
        "decode_tokens_per_second": (len(tokens) - 1) / (end - meter.first_token) if len(tokens) > 1 else None,
        "kv_bytes": meter.storage.peak_bytes,
        "mean_slots": meter.storage.mean_slots,
        "peak_slots": meter.storage.peak_slots,
    }
    return tokens[:-1] if tokens[-1] in stop_ids else tokens, numbers


class _Meter(StoppingCriteria):
    """Never stops anything; called after every token, it notes when the first one was there and what the cache stores."""

    def __init__(self, cache: DynamicCache):
        self.storage = Storage()
        self.first_token: float | None = None
        self._cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        after_prompt = self.first_token is not None
        if not after_prompt:
            self.first_token = now(input_ids.device)
        self.storage.measure(self._cache, tokens=1 if after_prompt else 0)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _seed(seed: int, sample_id: str, question: int) -> int:
    digest = hashlib.sha256(f"{seed}:{sample_id}:{question}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _mean_of_each(measured: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in measured[0]:
        values = [numbers[name] for numbers in measured if numbers[name] is not None]
        means[name] = statistics.fmean(values) if values else None
    return means
