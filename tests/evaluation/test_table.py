"""What the closing table shows, and what it must not keep quiet."""

from io import StringIO

import pytest
from rich.console import Console

from kvstitch.evaluation.table import only_room_is_larger, print_table


def one(mean, std=None, n=4):
    return {"n": n, "mean": mean, "std": std}


RUN = {
    "press": "ams", "scorer": "tova", "allocator": "segment_quota", "budget": "256 tokens", "num_sinks": 4, "num_recent": 32,
    "interval": 512, "model": "smollm2", "task": "reasoning", "mode": "replay", "seed": 42, "speed_tokens": 16,
}  # fmt: skip


def shown(metrics, run=RUN, width=100, **others):
    summary = {"run": run, "num_samples": 4, "failed_samples": {}, "budget_bound": True, "bound_samples": 4} | others
    summary = {"metrics": metrics} | summary
    output = StringIO()
    print_table(summary, Console(file=output, width=width))
    return output.getvalue()


def row(text, title):
    line = next(line for line in text.splitlines() if title in line)
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


METRICS = {
    "accuracy": one(0.5, 0.577), "dense_accuracy": one(0.75, 0.5), "nll": one(2.31, 0.2), "dense_nll": one(2.25, 0.2),
    "nll_difference": one(0.06, 0.01), "kl": one(0.052, 0.003), "top1_agreement": one(0.931),
    "mean_slots": one(498.2), "dense_mean_slots": one(1400), "kv_bytes": one(768 * 46080), "dense_kv_bytes": one(2**31),
    "wiped_regions": one(0.54), "events": one(4), "answer_tokens": one(3), "dense_answer_tokens": one(3),
    "compared_tokens": one(2000),
}  # fmt: skip


def test_pressed_and_dense_stand_side_by_side():
    text = shown(METRICS)
    assert "press=ams scorer=tova allocator=segment_quota" in text
    assert "budget: 256 tokens a kv head, 4 sinks and 32 recent tokens among them" in text and "4 samples" in text
    assert row(text, "answers right") == ["answers right", "50.0 % ± 57.7 %", "75.0 % ± 50.0 %"]
    assert row(text, "NLL difference") == ["NLL difference", "+0.0600 ± 0.0100", "–"]
    assert row(text, "top-1") == ["top-1 agreement", "93.1 %", "–"]
    assert row(text, "slots a kv head, mean") == ["slots a kv head, mean", "498", "1400"]
    assert row(text, "KV storage, peak") == ["KV storage, peak", "33.8 MiB", "2.00 GiB"]
    assert row(text, "events a sample") == ["events a sample", "4.0", "–"]
    # Not measured, or without meaning in this mode.
    assert "peak" in text and "slots a kv head, peak" not in text and "answer tokens" not in text
    assert "answer tokens" in shown(METRICS, run=RUN | {"mode": "generate"})


def test_what_is_kept_and_freed_is_shown_where_it_was_measured_and_says_something():
    kept = {"mean_kept_bytes": one(2**25), "kept_bytes": one(2**26), "mean_freed_bytes": one(2**30)}
    text = shown(METRICS | kept | {"mean_unfreed_bytes": one(0.0)})
    assert row(text, "KV attended to, mean") == ["KV attended to, mean", "32.0 MiB", "–"]
    assert row(text, "KV attended to, peak") == ["KV attended to, peak", "64.0 MiB", "–"]
    assert row(text, "evicted and freed") == ["evicted and freed, mean", "1.00 GiB", "–"]
    assert "evicted but stored" not in text
    ragged = shown(METRICS | kept | {"mean_unfreed_bytes": one(2**20)})
    assert row(ragged, "evicted but stored") == ["evicted but stored, mean", "1.0 MiB", "–"]
    # A method that frees nothing says so; a run from before these were measured says nothing.
    assert row(shown(METRICS | kept | {"mean_freed_bytes": one(0.0)}), "evicted and freed")[1] == "0.0 B"
    assert "attended to" not in shown(METRICS) and "evicted and freed" not in shown(METRICS)


def test_the_table_fits_a_narrow_terminal():
    assert max(map(len, shown(METRICS, width=80).splitlines())) <= 80


def test_dense_alone_has_one_column():
    nothing = dict.fromkeys(("scorer", "allocator", "budget", "num_sinks", "num_recent"))
    metrics = {"accuracy": one(None, n=0), "dense_accuracy": one(0.75), "nll_difference": one(None, n=0)}
    text = shown(metrics, run=RUN | {"press": "dense"} | nothing, budget_bound=None, bound_samples=None)
    assert row(text, "answers right") == ["answers right", "75.0 %"]
    assert "NLL difference" not in text and "None" not in text and "NEVER" not in text


@pytest.mark.parametrize(
    "others, message",
    [
        (
            {"budget_bound": False},
            "THE BUDGET NEVER BOUND: no sample ever held more than 256 tokens when an event was due",
        ),
        ({"bound_samples": 3}, "The budget bound in 3 of 4 samples; in the others nothing was evicted or left unread."),
        (
            {"failed_samples": {"x-3": "the dense model's logits are not finite"}},
            "1 samples failed and count in no metric (x-3: the",
        ),
        (
            {"skipped_records": ["a.jsonl, line 3: no field 'answer'"]},
            "1 malformed records were skipped, the first: a.jsonl",
        ),
        ({"metrics": METRICS | {"dense_reused": one(1.0)}}, "The dense model's side was read from an earlier run"),
        (
            {"metrics": METRICS | {"kv_bytes": one(2**32), "peak_slots": one(900), "dense_peak_slots": one(1000)}},
            "KV storage is larger than the dense model's although no more slots are stored",
        ),
        ({"metrics": METRICS | {"compared_tokens": one(0)}}, "No trace was longer than one interval of 512 tokens"),
    ],
)
def test_what_the_reader_must_not_miss(others, message):
    text = shown(**({"metrics": METRICS, "width": 400} | others))
    assert message in text
    assert message not in shown(METRICS, width=400)


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({}, True),
        ({"slots": 100.0}, True),
        ({"slots": 101.0}, False),
        ({"bytes": 10.0}, False),
        ({"dense_slots": None}, False),
    ],
)
@pytest.mark.parametrize("names", [("kv_bytes", "peak_slots"), ("mean_kv_bytes", "mean_slots")])
def test_more_bytes_with_no_more_slots_are_room_for_growth(names, changed, expected):
    values = {"bytes": 11.0, "dense_bytes": 10.0, "slots": 90.0, "dense_slots": 100.0} | changed
    named = {
        prefix + name: values[prefix + kind]
        for name, kind in zip(names, ("bytes", "slots"))
        for prefix in ("", "dense_")
    }
    assert only_room_is_larger(named.get) is expected


@pytest.mark.parametrize(
    "sinks, message",
    [
        (
            4,
            "no sample ever held more than 256 tokens at a decoded token, so everything was read and the press was not tested",
        ),
        (None, "no sample ever held more than 256 tokens before its questions, so nothing was evicted"),
    ],
    ids=["retrieval", "kvpress"],
)
def test_what_was_not_tested_is_told_by_the_kind_of_press(sinks, message):
    """Neither retrieval nor kvpress has an interval, or a prompt to compress."""
    run = RUN | {"interval": None, "num_sinks": sinks, "num_recent": None}
    text = shown(METRICS | {"compared_tokens": one(0)}, run=run, width=400, budget_bound=False, bound_samples=0)
    assert message in text and "None" not in text and "compress_prompt" not in text and "interval" not in text
    assert "No trace had two tokens" in text


def test_tables_of_runs_that_did_not_count_what_bound():
    assert "bound in" not in shown(METRICS, bound_samples=None)


def test_a_peak_that_both_models_share_is_not_shown():
    peak = METRICS | {"peak_process_bytes": one(2**30)}
    assert "process, peak" not in shown(peak)
    text = shown(peak | {"dense_peak_process_bytes": one(2**29)}, run=RUN | {"mode": "generate"})
    assert row(text, "process, peak") == ["process, peak", "1.00 GiB", "512.0 MiB"]


def test_perplexity_stands_beside_that_of_the_dense_model():
    text = shown(METRICS | {"perplexity": one(10.074, 2.0), "dense_perplexity": one(9.488)})
    assert row(text, "perplexity") == ["perplexity", "10.07 ± 2.00", "9.49"]
