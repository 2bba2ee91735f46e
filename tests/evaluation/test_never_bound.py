"""The cause that is named is the true one, and the options that are named cure it."""

import pytest

from kvstitch.evaluation.never_bound import never_bound
from kvstitch.evaluation.replay import replay_sample
from kvstitch.evaluation.summary import summary

RUN = {"press": "ams", "budget": "24 tokens", "num_sinks": 1, "num_recent": 1, "interval": 64, "mode": "replay"}
NOT_DUE = "but no event was ever due"


def told(tiny, press, task, sample, **changed):
    record = replay_sample(tiny, press, task, sample, interval=press.interval, speed_tokens=0).record
    found = summary([record], RUN | {"budget": str(press.budget), "interval": press.interval} | changed)
    return found["budget_bound"], never_bound(found)


@pytest.mark.parametrize("budget", [24, 0.5, "6KiB"])
def test_a_text_that_is_prefilled_whole_is_the_cause(tiny, make_press, make_sample, make_task, budget):
    sample = make_sample("a", prompt=100, trace=0)
    bound, text = told(tiny, make_press(budget, 64), make_task([sample]), sample)
    assert not bound and NOT_DUE in text and "64 tokens after what is prefilled" in text and "no text went on" in text
    for option in ("task.prefill_tokens", "task.length", "interval", "press.compress_prompt=true"):
        assert option in text.partition("Prefill less")[1] + text.partition("Prefill less")[2]
    assert "ower the budget" not in text
    # Each of the cures cures.
    for cured in (
        (make_press(budget, 64, compress_prompt=True), sample),
        (make_press(budget, 64), make_sample("a", prompt=10, trace=90)),
        (make_press(budget, 64), make_sample("a", prompt=100, trace=90)),
        (make_press(budget, 2), make_sample("a", prompt=100, trace=0)),
    ):
        assert told(tiny, cured[0], make_task([cured[1]]), cured[1])[0]


def test_a_budget_above_what_is_held_is_the_cause(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", prompt=10, trace=90)
    for budget in (500, "10MiB"):
        bound, text = told(tiny, make_press(budget, 16), make_task([sample]), sample)
        assert not bound and NOT_DUE not in text
        assert "so nothing was evicted" in text and "Lower the budget or take longer samples (task.length)." in text
        assert "interval" not in text and "compress_prompt" not in text


@pytest.mark.parametrize("budget", ["24 tokens", "0.5 of the tokens"])
def test_short_answers_are_the_cause_where_they_are_generated(budget):
    found = {"run": RUN | {"mode": "generate", "budget": budget}, "metrics": {"peak_slots": {"mean": 300.0}}}
    text = never_bound(found)
    assert NOT_DUE in text and "no answer went on for so long" in text and "press.compress_prompt=true" in text
    assert "task.max_new_tokens" in text and "task.prefill_tokens" not in text


def test_where_figures_do_not_tell_both_causes_are_named():
    for metrics in ({}, {"peak_slots": {"mean": 300.0}, "compared_tokens": {"mean": 5}}):
        text = never_bound({"run": RUN, "metrics": metrics})
        assert (
            "no sample ever held more than 24 tokens when an event was due" in text and "press.compress_prompt" in text
        )
