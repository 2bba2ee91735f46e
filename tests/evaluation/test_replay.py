"""Replay against the same sequence fed one token at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from kvstitch.evaluation.metrics import NonFiniteLogits
from kvstitch.evaluation.replay import chunks, replay_sample

PROMPT, TRACE, INTERVAL = 10, 90, 16


@given(st.integers(0, 400), st.integers(1, 150), st.integers(1, 80))
def test_chunks_cover_everything_and_stop_at_every_event(length, interval, most):
    cut = list(chunks(length, interval, most))
    assert [token for chunk in cut for token in range(chunk.start, chunk.stop)] == list(range(length))
    assert all(1 <= chunk.stop - chunk.start <= most for chunk in cut)
    assert set(range(0, length, interval)) <= {chunk.start for chunk in cut}


def one_by_one(model, sample, press):
    """Logits after each trace token, slots before each, the run: the sequence as decoding would see it."""
    cache = DynamicCache(config=model.config)
    logits, slots = [], []

    def feed(ids):
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]

    def through():
        feed(list(sample.prompt_ids))
        for token in sample.trace_ids:
            logits.append(feed([token]))
            slots.append(cache.layers[0].keys.shape[2])

    if press is None:
        through()
        return torch.stack(logits), slots, None
    with press(model) as run:
        through()
    return torch.stack(logits), slots, run


def pressed_answer(model, press, sample, question, count):
    """Prompt, trace one by one, cue, greedy answer: one sequence without any copy of a cache."""
    cache = DynamicCache(config=model.config)

    def step(tokens):
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache).logits[0, -1]

    with press(model) as run:
        step(sample.prompt_ids)
        for token in sample.trace_ids:
            step([token])
        logits, tokens = step(question.cue_ids), []
        while len(tokens) < count and int(logits.argmax()) != 2:
            tokens.append(int(logits.argmax()))
            logits = step(tokens[-1:])
    return tokens, run


def replay(tiny, press, task, sample, speed_tokens=0):
    return replay_sample(tiny, press, task, sample, interval=INTERVAL, speed_tokens=speed_tokens)


@pytest.mark.parametrize("compress_prompt", [False, True])
def test_replay_measures_what_decoding_token_by_token_gives(tiny, make_press, make_sample, make_task, compress_prompt):
    press = make_press(budget=8 if compress_prompt else 24, interval=INTERVAL, compress_prompt=compress_prompt)
    sample = make_sample("a", PROMPT, TRACE, questions=0)
    metrics = replay(tiny, press, make_task([sample]), sample).record["metrics"]
    dense, _, _ = one_by_one(tiny.model, sample, None)
    pressed, slots, run = one_by_one(tiny.model, sample, press)

    first = 0 if compress_prompt else INTERVAL
    log_dense, log_pressed = (x[first:-1].double().log_softmax(-1) for x in (dense, pressed))
    targets = torch.tensor(sample.trace_ids[first + 1 :])[:, None]
    assert metrics["compared_tokens"] == TRACE - 1 - first
    assert metrics["kl"] == pytest.approx(float((log_dense.exp() * (log_dense - log_pressed)).sum(-1).mean()), rel=1e-3)
    assert metrics["kl"] > 0.01
    assert metrics["nll"] == pytest.approx(float(-log_pressed.gather(1, targets).mean()), rel=1e-4)
    assert metrics["dense_nll"] == pytest.approx(float(-log_dense.gather(1, targets).mean()), rel=1e-4)
    assert metrics["nll_difference"] == pytest.approx(metrics["nll"] - metrics["dense_nll"])
    agreement = (log_dense.argmax(-1) == log_pressed.argmax(-1)).double().mean()
    assert metrics["top1_agreement"] == pytest.approx(float(agreement)) and 0 < agreement < 1

    assert metrics["events"] == run.num_events == (6 if compress_prompt else 5)
    assert metrics["mean_slots"] == pytest.approx(sum(slots) / len(slots))
    assert metrics["dense_mean_slots"] == pytest.approx(PROMPT + (TRACE + 1) / 2)
    assert metrics["peak_slots"] == run.peak_tokens and metrics["dense_peak_slots"] == PROMPT + TRACE
    layers, heads, dim, itemsize = 3, 2, 16, 4
    assert metrics["dense_kv_bytes"] == 2 * layers * heads * (PROMPT + TRACE) * dim * itemsize
    assert metrics["kv_bytes"] >= 2 * layers * heads * run.peak_tokens * dim * itemsize


def test_wipe_out_is_that_of_the_last_event(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", PROMPT, 300, questions=0)
    press = make_press(budget=4, interval=INTERVAL)
    result = replay(tiny, press, make_task([sample]), sample)
    last = result.events[-1]
    assert last.seen_tokens == PROMPT + 18 * INTERVAL
    shares = []
    for layer in last.layers:
        for head in layer.positions[0].tolist():
            regions = math.ceil(last.seen_tokens / 64)
            shares.append(sum(not any(r * 64 <= p < (r + 1) * 64 for p in head) for r in range(regions)) / regions)
    assert result.record["metrics"]["wiped_regions"] == pytest.approx(sum(shares) / len(shares)) != 0
    assert 0 < result.record["metrics"]["retained_iou"] < 1
    assert result.record["metrics"]["event_seconds"] > 0 and 0 < result.record["metrics"]["event_time_share"] < 1


def test_answers_continue_both_caches(tiny, make_press, make_sample, make_task):
    """Each question is asked of the cache as the trace left it: alone, first or last, its answer is the same."""
    press = make_press(budget=24, interval=INTERVAL)
    both = make_sample("a", PROMPT, TRACE, questions=2, max_new_tokens=6)
    task = make_task([both])
    answers = replay(tiny, press, task, both, speed_tokens=3).record["answers"]
    for index, question in enumerate(both.questions):
        alone = type(both)(both.id, both.prompt_ids, both.trace_ids, (question,))
        assert replay(tiny, press, task, alone).record["answers"] == [answers[index]]
        ids = torch.tensor([both.input_ids(question)])
        out = tiny.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        wanted = tiny.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert answers[index]["dense"]["text"] == wanted
        tokens, run = pressed_answer(tiny.model, press, both, question, 6)
        assert run.num_events >= 5
        assert answers[index]["pressed"]["text"] == tiny.tokenizer.decode(tokens, skip_special_tokens=True)
        assert answers[index]["pressed"]["tokens"] == len(tokens)
    assert answers[0]["pressed"] != answers[1]["pressed"] or answers[0]["dense"] != answers[1]["dense"]


def test_events_while_answering_count(tiny, make_press, make_sample, make_task):
    """A sample without a trace has its events in the answer; of several questions, the last one's are told."""
    press = make_press(budget=8, interval=4)
    sample = make_sample("a", 30, 0, questions=2, max_new_tokens=20)
    task = make_task([sample])
    tiny.model.generation_config.eos_token_id = None
    tiny.tokenizer.eos_token = None
    result = replay_sample(tiny, press, task, sample, interval=4, speed_tokens=0)
    # The cue has 2 tokens, 19 of 20 answer tokens are fed: an event before tokens 5, 9, 13, 17 and 21.
    assert result.record["metrics"]["events"] == 5
    assert [event.seen_tokens for event in result.events] == [34, 38, 42, 46, 50]
    assert result.record["metrics"]["compared_tokens"] == 0 and result.record["metrics"]["kl"] is None


def test_dense_alone_gives_the_dense_figures(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", PROMPT, TRACE)
    task = make_task([sample])
    alone = replay(tiny, None, task, sample, speed_tokens=2)
    beside = replay(tiny, make_press(interval=INTERVAL), task, sample, speed_tokens=2)
    assert list(alone.events) == []
    assert "pressed" not in alone.record["answers"][0] and "events" not in alone.record["metrics"]
    for name in ("dense_nll", "dense_accuracy", "dense_mean_slots", "dense_kv_bytes", "compared_tokens"):
        assert alone.record["metrics"][name] == pytest.approx(beside.record["metrics"][name]), name
    assert alone.record["metrics"]["nll"] is None and alone.record["metrics"]["accuracy"] is None
    assert alone.record["metrics"]["dense_decode_tokens_per_second"] > 0
    assert alone.record["metrics"]["decode_tokens_per_second"] is None


def test_a_budget_that_never_binds_changes_nothing(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", PROMPT, TRACE)
    metrics = replay(tiny, make_press(budget=500), make_task([sample]), sample, speed_tokens=2).record["metrics"]
    assert metrics["events"] == 0 and metrics["wiped_regions"] == 0 and metrics["retained_iou"] is None
    assert metrics["kl"] == pytest.approx(0, abs=1e-5) and metrics["top1_agreement"] == 1
    assert metrics["accuracy"] == metrics["dense_accuracy"] and metrics["decode_tokens_per_second"] > 0


def test_timed_steps_do_not_touch_the_other_figures(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", PROMPT, TRACE)
    task = make_task([sample])
    timing = ("second", "time_share")
    plain, timed = (
        {
            name: value
            for name, value in replay(tiny, make_press(), task, sample, speed_tokens=count).record["metrics"].items()
            if not any(word in name for word in timing)
        }
        for count in (0, 40)
    )
    assert plain == timed


def test_nan_logits_stop_the_sample_and_the_model_stays_whole(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", PROMPT, TRACE)
    attention = tiny.model.config._attn_implementation
    tiny.model.lm_head.weight.data[5] = math.nan
    with pytest.raises(NonFiniteLogits, match="not finite"):
        replay(tiny, make_press(), make_task([sample]), sample)
    short = make_sample("b", PROMPT, 0)
    with pytest.raises(NonFiniteLogits, match="after 0 decoded tokens"):
        replay(tiny, make_press(), make_task([short]), short)
    assert tiny.model.config._attn_implementation == attention
