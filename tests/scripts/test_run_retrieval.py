"""Retrieval from the command line: every way to choose what is read, next to dense, in a run folder like the others."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def arguments(tiny_folder, records):
    return (
        "model=hub",
        f"model.name={tiny_folder}",
        "model.device=cpu",
        "task=jsonl",
        f"task.path={records}",
        "task.trace_field=trace",
        "task.cue=' w7 w8'",
        "task.max_new_tokens=3",
        "task.num_samples=1",
        "budget=40",
        "decode_tokens=12",
        "speed_tokens=2",
    )


def metrics_of(outcome):
    assert outcome.status == 0, outcome.err
    (folder,) = [path for path in Path("runs").iterdir() if path.is_dir() and f"run folder: {path}" in outcome.out]
    return folder, json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize(
    "allocator",
    [None, "community_paper", "pages", "clusters", "window_retrieval", "oracle", "graph_eviction"],
)
def test_every_way_to_choose(script, arguments, allocator):
    chosen = () if allocator is None else (f"allocator={allocator}",)
    outcome = script("run", *arguments, "press=community", *chosen)
    folder, metrics = metrics_of(outcome)
    name = allocator or "community"
    assert folder.name.startswith(f"jsonl-community-{name}-40-") and metrics["budget_bound"]
    means = {key: value["mean"] for key, value in metrics["metrics"].items()}
    assert means["compared_tokens"] == 11 and means["kl"] > 0 and means["accuracy"] is not None
    assert means["read_slots"] == 40 if name != "pages" else 40 <= means["read_slots"] <= 80
    assert f"press=community allocator={name}" in outcome.out
    assert "40 tokens a kv head and step, 10 sinks and the newest tokens among them" in outcome.out
    assert "slots read, kv head and step" in outcome.out


def test_answers_are_generated_from_what_is_read(script, arguments):
    outcome = script("run", *arguments, "press=community", "mode=generate")
    _, metrics = metrics_of(outcome)
    assert metrics["metrics"]["events"]["mean"] == 1 and metrics["metrics"]["index_share"]["mean"] > 0
    assert metrics["metrics"]["answer_tokens"]["mean"] > 0


def test_communities_are_regions_for_eviction_too(script, arguments):
    outcome = script("run", *arguments, "press=ams", "allocator=community_quota", "interval=16", "allocator.top_k=3")
    _, metrics = metrics_of(outcome)
    assert metrics["metrics"]["events"]["mean"] > 0 and metrics["metrics"]["kl"]["mean"] > 0


@pytest.mark.parametrize(
    "override, message",
    [
        ("budget=12", "at least 14 slots, got 12"),
        ("allocator.resolution=0", "resolution must be positive, or 'auto', got 0"),
        ("allocator.top_k=95", "top_k must be less than the 78 tokens of the prompt"),
        ("decode_tokens=200", "decode_tokens must leave a prompt"),
        ("press.dense_layers=3", "`press.dense_layers` must leave a full-attention layer"),
        ("scorer=tova", "asks for no `scorer`"),
    ],
)
def test_what_cannot_be_is_said_in_one_message(script, arguments, override, message):
    outcome = script("run", *arguments, "press=community", override)
    assert outcome.status == 1 and message in outcome.err and "Traceback" not in outcome.err
