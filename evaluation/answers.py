"""Graded answers of the pressed and the dense model, as they are recorded, and what they come to."""

import statistics
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.base import Question, Task

Answer = dict[str, Any]


def graded(task: Task, question: Question, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> Answer:
    """One side's answer.

    Args:
        token_ids: what was decoded, without the token that ended it.

    Returns:
        `text`, `score`, `tokens`, and `truncated`: whether `max_new_tokens` ended it.
    """
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return {
        "text": text,
        "score": float(task.grade(question, text)),
        "tokens": len(token_ids),
        "truncated": len(token_ids) >= question.max_new_tokens,
    }


def answer_metrics(answers: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Means over the questions of a sample; a side that did not run, and a sample without questions, have None."""
    metrics: dict[str, float | None] = {}
    for side, prefix in (("pressed", ""), ("dense", "dense_")):
        sides = [answer[side] for answer in answers if side in answer]
        for name, key in (("accuracy", "score"), ("answer_tokens", "tokens"), ("truncated", "truncated")):
            metrics[prefix + name] = statistics.fmean(float(side[key]) for side in sides) if sides else None
    return metrics
