"""Generation with a press and without, against `model.generate` called by hand."""

import pytest
import torch

from kvstitch.evaluation.generate import Sampling, generate_sample
from kvstitch.evaluation.metrics import NonFiniteLogits
from kvstitch.evaluation.records import RunError


def by_hand(tiny, sample, press, count):
    ids = torch.tensor([sample.input_ids(sample.questions[0])])
    arguments = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    if press is None:
        return tiny.model.generate(**arguments)[0, ids.shape[1] :], None
    with press(tiny.model) as run:
        return tiny.model.generate(**arguments)[0, ids.shape[1] :], run


def test_answers_and_figures_are_those_of_generate(tiny, make_press, make_sample, make_task):
    tiny.model.generation_config.eos_token_id = None
    tiny.tokenizer.eos_token = None
    sample = make_sample("a", 10, 30, max_new_tokens=40)
    press = make_press(budget=24, interval=16)
    result = generate_sample(tiny, press, make_task([sample]), sample, sampling=Sampling(), seed=3)
    metrics, answer = result.record["metrics"], result.record["answers"][0]
    for side, used in (("pressed", press), ("dense", None)):
        tokens, run = by_hand(tiny, sample, used, 40)
        assert answer[side]["text"] == tiny.tokenizer.decode(tokens, skip_special_tokens=True)
        assert answer[side]["tokens"] == 40 and answer[side]["truncated"]
        if run is not None:
            assert metrics["events"] == run.num_events == 2 == len(result.events)
            assert metrics["peak_slots"] == run.peak_tokens
    # 42 prompt tokens, then 39 are fed one at a time.
    assert metrics["dense_mean_slots"] == pytest.approx(42 + 40 / 2) and metrics["dense_peak_slots"] == 81
    assert metrics["dense_kv_bytes"] == 2 * 3 * 2 * 81 * 16 * 4
    # Events before decoded tokens 17 and 33.
    grown = (
        [42 + step for step in range(1, 17)]
        + [24 + step for step in range(1, 17)]
        + [24 + step for step in range(1, 8)]
    )
    assert metrics["mean_slots"] == pytest.approx(sum(grown) / 39)
    for name in ("prefill_seconds", "decode_tokens_per_second"):
        assert metrics[name] > 0 and metrics[f"dense_{name}"] > 0
    assert answer["pressed"]["text"] != answer["dense"]["text"]


def test_the_end_token_is_left_out_of_the_answer(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", 10, 30, max_new_tokens=12)
    task = make_task([sample])
    free, _ = by_hand(tiny, sample, None, 12)
    end = free[5]
    tiny.model.generation_config.eos_token_id = int(end)
    answer = generate_sample(tiny, None, task, sample, sampling=Sampling(), seed=3).record["answers"][0]
    until = free.tolist().index(int(end))
    assert answer["dense"]["tokens"] == until and not answer["dense"]["truncated"] and "pressed" not in answer
    assert answer["dense"]["text"] == tiny.tokenizer.decode(free[:until], skip_special_tokens=True)


def test_a_draw_depends_on_seed_sample_and_question_alone(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", 10, 30, questions=2, max_new_tokens=8)
    task = make_task([sample])
    sampling = Sampling(do_sample=True, temperature=2.0, top_p=1.0)
    draw = lambda seed: generate_sample(tiny, make_press(), task, sample, sampling=sampling, seed=seed).record[
        "answers"
    ]
    first = draw(1)
    torch.rand(5)
    assert draw(1) == first
    assert draw(2) != first
    assert first[0]["dense"]["text"] != first[1]["dense"]["text"]


def test_a_sample_without_questions_is_refused(tiny, make_press, make_sample, make_task):
    sample = make_sample("book-3", 10, 30, questions=0)
    with pytest.raises(RunError, match="'book-3' asks nothing.*mode=replay"):
        generate_sample(tiny, make_press(), make_task([sample]), sample, sampling=Sampling(), seed=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 0}, r"sampling.temperature must be above 0, got 0; write sampling.do_sample=false"),
        ({"top_p": 0.0}, r"sampling.top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"got 1.5"),
        ({"top_k": -1}, r"sampling.top_k must be at least 0, got -1"),
        ({"do_sample": "yes"}, r"sampling.do_sample must be true or false, got 'yes'"),
    ],
)
def test_impossible_sampling_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Sampling(**options)


def test_several_draws_of_a_question_differ_and_are_told_apart(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", questions=2)
    task = make_task([sample])
    sampling = Sampling(do_sample=True, temperature=2.0, top_p=1.0, samples_per_question=3)
    record = generate_sample(tiny, make_press(), task, sample, sampling=sampling, seed=3).record
    assert [(answer["question"], answer["draw"]) for answer in record["answers"]] == [
        (question, draw) for question in range(2) for draw in range(3)
    ]
    assert len({answer["dense"]["text"] for answer in record["answers"]}) > 2
    scores = [answer["pressed"]["score"] for answer in record["answers"]]
    assert record["metrics"]["pass_at_1"] == record["metrics"]["accuracy"] == sum(scores) / 6
    # The first draw is the one of a run with a single draw.
    once = Sampling(do_sample=True, temperature=2.0, top_p=1.0)
    single = generate_sample(tiny, make_press(), task, sample, sampling=once, seed=3).record
    assert single["answers"][0]["dense"] == record["answers"][0]["dense"] and "draw" not in single["answers"][0]
    again = generate_sample(tiny, make_press(), task, sample, sampling=sampling, seed=3).record
    assert again["answers"] == record["answers"]


def test_several_greedy_answers_are_refused():
    with pytest.raises(ValueError, match="samples_per_question=2 needs sampling.do_sample=true"):
        Sampling(samples_per_question=2)
    with pytest.raises(ValueError, match=r"sampling\.samples_per_question must be at least 1, got 0"):
        Sampling(samples_per_question=0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(do_sample=True)], ids=["greedy", "drawn"])
def test_nan_is_never_an_answer(tiny, make_sample, make_task, sampling):
    sample = make_sample("a")
    tiny.model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(NonFiniteLogits, match="after 102 tokens hold NaN"):
        generate_sample(tiny, None, make_task([sample]), sample, sampling=sampling, seed=3)


def test_memory_is_measured_on_both_sides(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", max_new_tokens=40)
    metrics = generate_sample(tiny, make_press(), make_task([sample]), sample, sampling=Sampling(), seed=3).record[
        "metrics"
    ]
    assert metrics["peak_process_bytes"] > 2**20 and metrics["dense_peak_process_bytes"] > 2**20
    # Positions alone are 8 bytes a slot, two heads, three layers.
    assert metrics["auxiliary_bytes"] >= metrics["mean_slots"] * 8 * 2 * 3 and metrics["dense_auxiliary_bytes"] == 0
