"""Replay: a text fed teacher-forced through the pressed and the dense model in lock step, then questions about it.

Needs no sampling, is deterministic, and shows token by token what the eviction cost.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvstitch.evaluation.answers import answer_metrics, graded
from kvstitch.evaluation.baseline import DenseBaselines
from kvstitch.evaluation.compactions import event_metrics
from kvstitch.evaluation.dense_side import LiveDense, RecordedDense, dense_beside, storage_metrics
from kvstitch.evaluation.kept_bytes import KeptBytes
from kvstitch.evaluation.metrics import TokenComparison, compare_tokens, token_nll
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.recall import RecallRun
from kvstitch.evaluation.results import SampleResult, make_record
from kvstitch.evaluation.streams import Storage, Stream
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.presses import CompactionEvent, EvictionPress

# Logits of a chunk are held for both models: 512 x 150,000 words in float32 are 0.3 GB each.
MAX_CHUNK_TOKENS = 512
# Queries of each chunk that are asked for their attention mass: evenly spaced, a small part of what the chunk itself costs.
MASS_QUERIES = 16


def chunks(length: int, interval: int, most: int = MAX_CHUNK_TOKENS) -> Iterator[slice]:
    """Cut `length` tokens so that an event can stand before every `interval`-th one and no chunk exceeds `most`."""
    start = 0
    while start < length:
        end = min(start + most, length, (start // interval + 1) * interval)
        yield slice(start, end)
        start = end


def replay_sample(
    loaded: LoadedModel,
    press: EvictionPress | None,
    task: Task,
    sample: Sample,
    *,
    interval: int,
    speed_tokens: int,
    baselines: DenseBaselines | None = None,
    mass_queries: int = MASS_QUERIES,
) -> SampleResult:
    """Prompt, trace and questions of one sample through the pressed and the dense model.

    NLL, KL, agreement and mass recall are means over the trace's tokens from the second interval on: before, nothing has
    been evicted and both models are the same. (With `compress_prompt` they start at the first token.)

    Args:
        loaded: model and tokenizer.
        press: None runs the dense model alone.
        task: grades the answers.
        interval: tokens between events.
        speed_tokens: greedy decode steps that are timed at the end of the trace; 0 leaves it out.
        baselines: where the dense side is read, and kept if it is not there yet; None runs it every time. The metric
            `dense_reused` says which it was: its seconds and its speed are then those of the earlier run.
        mass_queries: tokens of each chunk whose attention mass is looked at, evenly spaced; 0 leaves mass recall out. See
            `kvstitch.evaluation.recall` for what it is. No seconds of the pressed model count it in.

    Raises:
        NonFiniteLogits: NaN in the logits of either model.
    """
    with ExitStack() as stack:
        first = 0 if _compresses_prompt(press) else interval
        run = None
        if press is not None:
            asked_from = len(sample.prompt_ids) + first
            run = stack.enter_context(RecallRun(press, loaded.model, mass_queries, asked_from))
        press_off = run.paused if run is not None else nullcontext
        dense = stack.enter_context(dense_beside(loaded, sample, baselines, press_off))
        pair = _LockStep(loaded, press, run, dense)
        metrics = pair.prefill(sample.prompt_ids)
        metrics |= _quality(pair, sample.trace_ids, interval, first)
        pair.end_trace()
        answers = [pair.ask(task, question) for question in sample.questions]
        metrics |= answer_metrics(answers) | pair.storage_metrics() | pair.event_metrics()
        events = pair.events
        # Last, because it goes on where the trace ended and spoils the caches.
        metrics |= pair.speed(speed_tokens) | dense.numbers()
    return SampleResult(make_record(sample, metrics, answers), events)


class _LockStep:
    """The pressed and the dense side of one sample; the press is at work except while the dense one is fed."""

    def __init__(
        self,
        loaded: LoadedModel,
        press: EvictionPress | None,
        run: RecallRun | None,
        dense: LiveDense | RecordedDense,
    ):
        self._tokenizer = loaded.tokenizer
        self._stop_ids = stop_token_ids(loaded)
        self._press = press
        self._run = run
        self._trace_events = 0
        # Those of the trace and of the last question: one sequence, whatever was asked in between.
        self.events: list[CompactionEvent] = []
        self.dense = dense
        self._pressed = Stream(loaded.model, storage=Storage(kept=KeptBytes())) if run is not None else None

    def prefill(self, token_ids: Sequence[int]) -> dict[str, float | None]:
        """Seconds that the pressed model took."""
        if self._pressed is not None:
            self._pressed.prefill(token_ids)
            self._run.end_prefill()
        self.dense.prefill(token_ids)
        return {"prefill_seconds": self._seconds() if self._pressed is not None else None}

    def feed(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits `[N, V]` of the dense and of the pressed model."""
        pressed = self._pressed.feed(token_ids) if self._pressed is not None else None
        return self.dense.feed(token_ids), pressed

    def _seconds(self) -> float:
        """What the pressed model took so far."""
        return self._pressed.seconds - self._run.measuring_seconds

    def end_trace(self) -> None:
        if self._run is not None:
            self._run.measuring = False
            self.events = list(self._run.events)
            self._trace_events = len(self.events)

    def ask(self, task: Task, question: Question) -> dict[str, Any]:
        """Both answers, each from a copy of the cache as the trace left it."""
        answer: dict[str, Any] = {"gold": list(question.gold), "meta": dict(question.meta)}
        if self._run is not None:
            before = len(self._run.events)
            answer["pressed"] = graded(task, question, self._tokenizer, self._answer(question))
            self.events = self.events[: self._trace_events] + self._run.events[before:]
        answer["dense"] = graded(task, question, self._tokenizer, self.dense.answer(question))
        return answer

    def _answer(self, question: Question) -> list[int]:
        with self._pressed.branch(self._press) as branch:
            if question.cue_ids:
                branch.feed(question.cue_ids)
            return branch.greedy(question.max_new_tokens, self._stop_ids)

    def storage_metrics(self) -> dict[str, float | None]:
        if self._pressed is None:
            return storage_metrics("", None)
        return storage_metrics("", self._pressed.storage) | self._pressed.storage.kept.metrics()

    def event_metrics(self) -> dict[str, float | None]:
        if self._run is None:
            return {}
        share = self._run.event_seconds / self._seconds()
        return (
            event_metrics(self.events, len(self._run.stored_tokens)) | {"event_time_share": share} | self._run.recall()
        )

    def speed(self, count: int) -> dict[str, float | None]:
        """Decoded tokens a second at the end of the trace; events that fall among them are not counted here."""
        speed = None
        if count and self._run is not None:
            speed = count / self._pressed.time_steps(count, lambda: self._run.event_seconds)
        self.dense.speed(count)
        return {"decode_tokens_per_second": speed}


def _quality(pair: _LockStep, trace: Sequence[int], interval: int, first: int) -> dict[str, float | None]:
    """Feed the trace; compare what was predicted after token `first` and each later one but the last."""
    parts: list[TokenComparison] = []
    dense_nll: list[Tensor] = []
    for chunk in chunks(len(trace), interval):
        dense, pressed = pair.feed(trace[chunk])
        start, stop = max(chunk.start, first), min(chunk.stop, len(trace) - 1)
        if start >= stop:
            continue
        rows = slice(start - chunk.start, stop - chunk.start)
        targets = torch.tensor(trace[start + 1 : stop + 1])
        if pressed is None:
            dense_nll.append(token_nll(dense[rows], targets))
        else:
            parts.append(compare_tokens(dense[rows], pressed[rows], targets))
            dense_nll.append(parts[-1].dense_nll)
    return {"compared_tokens": sum(part.numel() for part in dense_nll)} | _means(parts, dense_nll)


def _means(parts: list[TokenComparison], dense_nll: list[Tensor]) -> dict[str, float | None]:
    dense = torch.cat(dense_nll).double().mean().item() if dense_nll else None
    names = ("nll", "dense_nll", "nll_difference", "kl", "top1_agreement")
    if not parts:
        return dict.fromkeys(names) | {"dense_nll": dense}
    joined = TokenComparison.join(parts)
    nll = joined.nll.double().mean().item()
    values = (nll, dense, nll - dense, joined.kl.double().mean().item(), joined.agreement.mean().item())
    return dict(zip(names, values))


def _compresses_prompt(press: EvictionPress | None) -> bool:
    return press is not None and press.compress_prompt
