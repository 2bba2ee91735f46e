"""Graded answers of the pressed and the dense model, as they are recorded, and what they come to."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.metrics import repetition_rate
from kvstitch.evaluation.tasks.base import Question, Task

Answer = dict[str, Any]


def graded(task: Task, question: Question, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> Answer:
    """One side's answer.

    Args:
        token_ids: what was decoded, without the token that ended it.

    Returns:
        `text`, `score`, `tokens`, `truncated`: whether `max_new_tokens` ended it, and `repetition` of its tokens.
    """
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return {
        "text": text,
        "score": float(task.grade(question, text)),
        "tokens": len(token_ids),
        "truncated": len(token_ids) >= question.max_new_tokens,
        "repetition": repetition_rate(token_ids),
    }


def answer_metrics(answers: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Means over the answers of a sample; a side that did not run, and a sample without questions, have None.

    Returns:
        For both sides `accuracy`, `answer_tokens`, `truncated` and `repetition`. Where questions were answered several times
        the accuracy is pass@1, estimated from all answers, and is repeated under `pass_at_1`; `pass_at_k` is the share of
        questions with at least one answer that is wholly right among the k.
    """
    metrics: dict[str, float | None] = {}
    for side, prefix in (("pressed", ""), ("dense", "dense_")):
        sides = [answer[side] for answer in answers if side in answer]
        for name, key in (("accuracy", "score"), ("answer_tokens", "tokens"), ("truncated", "truncated")):
            metrics[prefix + name] = statistics.fmean(float(side[key]) for side in sides) if sides else None
        rates = [side["repetition"] for side in sides if side["repetition"] is not None]
        metrics[prefix + "repetition"] = statistics.fmean(rates) if rates else None
        if any("draw" in answer for answer in answers):
            metrics[prefix + "pass_at_1"] = metrics[prefix + "accuracy"]
            metrics[prefix + "pass_at_k"] = _any_right(answers, side)
    return metrics


def _any_right(answers: Sequence[dict[str, Any]], side: str) -> float | None:
    best: dict[int, float] = defaultdict(float)
    for answer in answers:
        if side in answer:
            best[answer["question"]] = max(best[answer["question"]], answer[side]["score"])
    return statistics.fmean(score == 1 for score in best.values()) if best else None
