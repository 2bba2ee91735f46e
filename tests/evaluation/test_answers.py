"""What answers come to: means, repetition, and pass@1 over several draws."""

import pytest

from kvstitch.evaluation.answers import answer_metrics
from kvstitch.evaluation.metrics import repetition_rate


@pytest.mark.parametrize(
    "tokens, rate",
    [
        ([], None),
        ([1, 2, 3], None),
        ([1, 2, 3, 4], 0.0),
        ([1, 2, 3, 4, 5, 6, 7], 0.0),
        # Five 4-grams, all the same.
        ([9] * 8, 0.8),
        # 1234 2341 3412 4123 1234: the fifth is the first again.
        ([1, 2, 3, 4, 1, 2, 3, 4], 0.2),
    ],
)
def test_repetition_is_the_share_of_n_grams_that_came_before(tokens, rate):
    assert repetition_rate(tokens) == (rate if rate is None else pytest.approx(rate))


def side(score, tokens=3, truncated=False, repetition=None):
    return {"score": score, "tokens": tokens, "truncated": truncated, "repetition": repetition}


def test_means_over_the_answers():
    answers = [
        {"pressed": side(1.0, 4, repetition=0.5), "dense": side(1.0)},
        {"pressed": side(0.0, 2, truncated=True), "dense": side(0.5)},
    ]
    metrics = answer_metrics(answers)
    assert (metrics["accuracy"], metrics["dense_accuracy"]) == (0.5, 0.75)
    assert (metrics["answer_tokens"], metrics["truncated"]) == (3, 0.5)
    # Of the answers that are long enough to repeat anything.
    assert metrics["repetition"] == 0.5 and metrics["dense_repetition"] is None
    assert "pass_at_1" not in metrics


def test_pass_at_one_is_the_mean_over_draws_and_pass_at_k_the_best_of_each_question():
    right = {0: [1.0, 0.0, 0.0], 1: [0.0, 0.0, 0.0], 2: [1.0, 1.0, 1.0], 3: [0.0, 0.5, 0.0]}
    answers = [
        {"question": question, "draw": draw, "pressed": side(score)}
        for question, scores in right.items()
        for draw, score in enumerate(scores)
    ]
    metrics = answer_metrics(answers)
    assert metrics["pass_at_1"] == metrics["accuracy"] == pytest.approx(4.5 / 12)
    assert metrics["pass_at_k"] == 0.5 and metrics["dense_pass_at_k"] is None
