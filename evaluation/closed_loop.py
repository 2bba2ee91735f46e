"""Closed loop: a text decoded token by token through a retrieving press, and fed to the dense model beside it.

Retrieval is at work in forwards of a single token only, so the trace cannot be fed in chunks as `replay` does.
"""

import dataclasses
from collections.abc import Sequence

import torch

from kvstitch.evaluation.answers import Answer, answer_metrics, graded
from kvstitch.evaluation.baseline import DenseBaselines
from kvstitch.evaluation.compactions import region_arrays
from kvstitch.evaluation.dense_side import LiveDense, RecordedDense, dense_beside, storage_metrics
from kvstitch.evaluation.metrics import NonFiniteLogits, TokenComparison, compare_tokens
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.reads import ReadMeter, index_metrics
from kvstitch.evaluation.results import SampleResult, make_record
from kvstitch.evaluation.streams import Stream
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.presses import RetrievalPress, RetrievalRun

# Logits are compared in blocks: 64 x 150,000 words in float32 are 40 MB a side.
_BLOCK_TOKENS = 64


def prefilled_but(sample: Sample, decode_tokens: int) -> Sample:
    """The same sample with all but its last `decode_tokens` tokens as the prompt.

    Raises:
        ValueError: the sample is not longer than that.
    """
    tokens = (*sample.prompt_ids, *sample.trace_ids)
    if len(tokens) <= decode_tokens:
        raise ValueError(
            f"decode_tokens must leave a prompt: sample {sample.id!r} has {len(tokens)} tokens, got {decode_tokens}; lower "
            "decode_tokens, or set it to null to split samples as the task does"
        )
    return dataclasses.replace(sample, prompt_ids=tokens[:-decode_tokens], trace_ids=tokens[-decode_tokens:])


def closed_loop_sample(
    loaded: LoadedModel,
    press: RetrievalPress,
    task: Task,
    sample: Sample,
    *,
    speed_tokens: int,
    baselines: DenseBaselines | None = None,
) -> SampleResult:
    """Prompt, trace and questions of one sample through the press and through the dense model.

    KL, agreement and NLL are means over the trace's tokens but the last. Questions are decoded from copies of the cache as
    the trace left it, their cues token by token, so that what leads to an answer is retrieved, too. `event_time_share` is
    what went into indices of all seconds of the pressed side, its looking at all keys for the mass included: without being
    measured a press spends a larger share on them, never a smaller one.

    Args:
        loaded: model and tokenizer.
        press: its `on_read` is called as well.
        task: grades the answers.
        speed_tokens: greedy decode steps timed at the end of the trace; 0 leaves it out.
        baselines: as in `replay_sample`.

    Raises:
        NonFiniteLogits: NaN in the logits of either model.
    """
    meter = ReadMeter(press.on_read)
    watched = dataclasses.replace(press, on_read=meter, measure_mass=True)
    with watched(loaded.model) as run, dense_beside(loaded, sample, baselines, run.paused) as dense:
        pressed = Stream(loaded.model)
        pressed.prefill(sample.prompt_ids)
        if pressed.ends_in_nan():
            # Said here, because no index can be made of it.
            raise NonFiniteLogits("the logits at the end of the prompt hold NaN")
        dense.prefill(sample.prompt_ids)
        metrics: dict[str, float | None] = {"prefill_seconds": pressed.seconds}
        metrics |= _quality(pressed, dense, sample.trace_ids)
        metrics |= meter.metrics(pressed.cache) | index_metrics(run)
        answers = [_ask(loaded, run, pressed, dense, task, question) for question in sample.questions]
        metrics |= answer_metrics(answers) | storage_metrics("", pressed.storage)
        metrics["event_time_share"] = run.event_seconds / pressed.seconds
        regions = region_arrays(run, sample.id)
        # After the answers, because it spoils the dense cache.
        dense.speed(speed_tokens)
        metrics |= dense.numbers()
    # A press that nobody watches owns the same cache, and its steps do not pay for what was measured.
    with dataclasses.replace(press, on_read=None, measure_mass=False)(loaded.model) as run:
        metrics["decode_tokens_per_second"] = _speed(run, pressed, speed_tokens)
    return SampleResult(make_record(sample, metrics, answers), regions=regions)


def _quality(pressed: Stream, dense: LiveDense | RecordedDense, trace: Sequence[int]) -> dict[str, float | None]:
    """Feed the trace to both and compare what they predict after each token but the last."""
    parts: list[TokenComparison] = []
    for start in range(0, len(trace), _BLOCK_TOKENS):
        block = trace[start : start + _BLOCK_TOKENS]
        expected = dense.feed(block)
        got = torch.cat([pressed.feed([token]) for token in block])
        targets = torch.tensor(trace[start + 1 : start + 1 + len(block)])
        parts.append(compare_tokens(expected[: len(targets)], got[: len(targets)], targets))
    return comparison_metrics(TokenComparison.join(parts))


def comparison_metrics(joined: TokenComparison) -> dict[str, float | None]:
    """Means over the compared tokens."""
    metrics: dict[str, float | None] = {"compared_tokens": joined.kl.numel()}
    names = ("kl", "top1_agreement", "nll", "dense_nll", "nll_difference")
    if not joined.kl.numel():
        return metrics | dict.fromkeys(names)
    nll, dense_nll = joined.nll.double().mean().item(), joined.dense_nll.double().mean().item()
    values = (joined.kl.double().mean().item(), joined.agreement.mean().item(), nll, dense_nll, nll - dense_nll)
    return metrics | dict(zip(names, values))


def _ask(
    loaded: LoadedModel,
    run: RetrievalRun,
    pressed: Stream,
    dense: LiveDense | RecordedDense,
    task: Task,
    question: Question,
) -> dict[str, object]:
    answer: dict[str, object] = {"gold": list(question.gold), "meta": dict(question.meta)}
    answer["pressed"] = decoded_answer(loaded, run.press, pressed, task, question)
    answer["dense"] = graded(task, question, loaded.tokenizer, dense.answer(question))
    return answer


def decoded_answer(
    loaded: LoadedModel, press: RetrievalPress, stream: Stream, task: Task, question: Question
) -> Answer:
    """The answer from a copy of the cache, its cue fed token by token; whoever calls decides whether a press is at work."""
    with stream.branch(press) as branch:
        for token in question.cue_ids:
            branch.feed([token])
        tokens = branch.greedy(question.max_new_tokens, stop_token_ids(loaded))
    return graded(task, question, loaded.tokenizer, tokens)


def _speed(run: RetrievalRun, pressed: Stream, count: int) -> float | None:
    """Decoded tokens a second at the end of the trace, without the building of indices."""
    if not count:
        return None
    return count / pressed.time_steps(count, lambda: run.event_seconds)
