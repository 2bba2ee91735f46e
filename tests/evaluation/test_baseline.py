"""A dense side read from a record gives what running it gives, bit for bit, and stands only for the sample it was made of."""

import dataclasses
import threading

import pytest
import torch

from kvstitch.evaluation.baseline import DenseBaselines, DenseRecord, fingerprint
from kvstitch.evaluation.generate import Sampling, generate_sample
from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.replay import replay_sample

TIMES = {
    "event_seconds",
    "prefill_seconds",
    "dense_prefill_seconds",
    "decode_tokens_per_second",
    "dense_decode_tokens_per_second",
    "event_time_share",
    "seconds",
    "dense_seconds",
    "dense_reused",
}


@pytest.fixture
def task(make_task, make_sample):
    return make_task([make_sample("a", questions=2), make_sample("b", questions=2)])


@pytest.fixture
def press(make_press):
    return make_press()


def same_but_times(first, second):
    numbers = [
        {
            name: value
            for name, value in result.record["metrics"].items()
            if name not in TIMES and not name.endswith("peak_process_bytes")
        }
        for result in (first, second)
    ]
    assert numbers[0] == numbers[1]
    assert first.record["answers"] == second.record["answers"]


def replay(tiny, press, task, sample, baselines):
    return replay_sample(tiny, press, task, sample, interval=16, speed_tokens=2, baselines=baselines)


def test_replay_from_a_record(tiny, press, task, tmp_path, monkeypatch):
    baselines = DenseBaselines(tmp_path / "dense", tiny.model, {"interval": 16})
    sample, other = task.samples(tiny.tokenizer, 2048)
    plain = replay(tiny, press, task, sample, None)
    made = replay(tiny, press, task, sample, baselines)
    assert made.record["metrics"]["dense_reused"] == 0 and baselines.path(sample).exists()
    assert not baselines.path(other).exists()
    tokens = []
    tiny.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    read = replay(tiny, press, task, sample, baselines)
    assert read.record["metrics"]["dense_reused"] == 1
    # Only the pressed model was fed.
    assert sum(tokens) < 1.5 * (len(sample.prompt_ids) + len(sample.trace_ids))
    same_but_times(plain, made)
    same_but_times(plain, read)
    assert read.record["metrics"]["kl"] > 1e-4


def test_a_dense_run_makes_what_a_pressed_one_reads(tiny, press, task, tmp_path):
    baselines = DenseBaselines(tmp_path, tiny.model, {})
    sample = next(task.samples(tiny.tokenizer, 2048))
    assert replay(tiny, None, task, sample, baselines).record["metrics"]["dense_reused"] == 0
    read = replay(tiny, press, task, sample, baselines)
    assert read.record["metrics"]["dense_reused"] == 1
    same_but_times(replay(tiny, press, task, sample, None), read)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(do_sample=True)])
def test_generate_from_a_record(tiny, press, task, tmp_path, sampling):
    baselines = DenseBaselines(tmp_path, tiny.model, {})
    sample = next(task.samples(tiny.tokenizer, 2048))
    results = [
        generate_sample(tiny, press, task, sample, sampling=sampling, seed=3, baselines=store)
        for store in (None, baselines, baselines)
    ]
    assert [result.record["metrics"]["dense_reused"] for result in results] == [0, 0, 1]
    same_but_times(results[0], results[1])
    same_but_times(results[0], results[2])


def test_a_record_is_found_by_all_that_made_it(tiny, task, tmp_path):
    sample = next(task.samples(tiny.tokenizer, 2048))
    baselines = DenseBaselines(tmp_path, tiny.model, {"interval": 16})
    trace = (*sample.trace_ids[:-1], sample.trace_ids[-1] + 1)
    paths = [
        baselines.path(sample),
        baselines.path(dataclasses.replace(sample, trace_ids=trace)),
        baselines.path(dataclasses.replace(sample, questions=sample.questions[:-1])),
        DenseBaselines(tmp_path, tiny.model, {"interval": 17}).path(sample),
    ]
    before = fingerprint(tiny.model)
    with torch.no_grad():
        tiny.model.model.layers[1].mlp.up_proj.weight[0, 3] += 1
    assert fingerprint(tiny.model) != before
    paths.append(DenseBaselines(tmp_path, tiny.model, {"interval": 16}).path(sample))
    assert len(set(paths)) == len(paths)


def test_a_torn_record_is_made_anew(tiny, press, task, tmp_path):
    baselines = DenseBaselines(tmp_path, tiny.model, {})
    sample = next(task.samples(tiny.tokenizer, 2048))
    whole = replay(tiny, press, task, sample, baselines)
    path = baselines.path(sample)
    path.write_bytes(path.read_bytes()[:100])
    again = replay(tiny, press, task, sample, baselines)
    assert again.record["metrics"]["dense_reused"] == 0
    same_but_times(whole, again)
    assert replay(tiny, press, task, sample, baselines).record["metrics"]["dense_reused"] == 1
    assert [kept.name for kept in tmp_path.glob("[!.]*")] == [path.name]


def test_a_model_that_bends_its_logits_is_run_every_time(tiny, press, task, tmp_path):
    forward = tiny.model.forward

    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    tiny.model.forward = capped
    baselines = DenseBaselines(tmp_path, tiny.model, {})
    sample = next(task.samples(tiny.tokenizer, 2048))
    for _ in range(2):
        assert replay(tiny, press, task, sample, baselines).record["metrics"]["dense_reused"] == 0
    assert not list(tmp_path.glob("[!.]*"))


def test_a_folder_that_cannot_be_written_is_named(tiny, task, tmp_path):
    (tmp_path / "file").write_text("")
    baselines = DenseBaselines(tmp_path / "file", tiny.model, {})
    with pytest.raises(RunError, match="dense baseline .*reuse_dense=false"):
        baselines.write(next(task.samples(tiny.tokenizer, 2048)), DenseRecord({}, []))


def test_who_asks_meanwhile_waits_for_the_one_who_makes_it(tiny, task, tmp_path):
    baselines = DenseBaselines(tmp_path, tiny.model, {})
    sample = next(task.samples(tiny.tokenizer, 2048))
    found = []

    def ask():
        with DenseBaselines(tmp_path, tiny.model, {}).once(sample) as record:
            found.append(record)

    others = [threading.Thread(target=ask) for _ in range(3)]
    with baselines.once(sample) as record:
        assert record is None
        for other in others:
            other.start()
        others[0].join(timeout=0.3)
        assert not found and all(other.is_alive() for other in others)
        baselines.write(sample, DenseRecord({"dense_nll": 1.5}, [[4, 5]]))
    for other in others:
        other.join(timeout=60)
    assert [record.numbers["dense_nll"] for record in found] == [1.5] * 3


def test_what_could_not_be_kept_is_made_by_each_at_the_same_time(tiny, task, tmp_path):
    """A process that failed, or a model whose logits cannot be read from a record, makes others wait once and no longer."""
    sample = next(task.samples(tiny.tokenizer, 2048))
    inside, all_there = [], threading.Barrier(2, timeout=60)

    def ask():
        with DenseBaselines(tmp_path, tiny.model, {}).once(sample) as record:
            inside.append(record)
            all_there.wait()

    others = [threading.Thread(target=ask) for _ in range(2)]
    with DenseBaselines(tmp_path, tiny.model, {}).once(sample):
        for other in others:
            other.start()
        others[0].join(timeout=0.3)
        assert not inside
    for other in others:
        other.join(timeout=60)
    assert inside == [None, None] and not all_there.broken
