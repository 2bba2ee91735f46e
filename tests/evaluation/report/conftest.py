"""Run folders as a run would have left them, without a model."""

import json
import random

import numpy as np
import pytest

from kvstitch.evaluation.records import folder_name, write_text
from kvstitch.evaluation.summary import summary


@pytest.fixture
def make_run(tmp_path):
    """`make_run(press, scorer, budget, …)` -> folder below `runs/`; figures are drawn from the names, so that they repeat."""

    def make(
        press="ams", scorer="tova", allocator="segment_quota", budget=256, seed=42, length=2048, samples=4, task="needle",
        shard=0, num_shards=1, leaves=None, failed=(), bound=True, arrays=True, config=None, skipped=(), mode="replay",
        asked=True, metrics=None,
    ):  # fmt: skip
        # `bound` may be how many samples bound, `metrics` are added to those of every sample that was measured.
        parts = {"_target_": f"kvstitch.press.{press}", "scorer": {"_target_": scorer}, "budget": budget}
        more = {key.removeprefix("task."): value for key, value in (config or {}).items()}
        config = {
            "budget": budget, "interval": 512, "mode": mode, "seed": seed, "model": {"_target_": "m"},
            "task": {"_target_": task, "length": length, "seed": seed, "shard": shard, "num_shards": num_shards} | more,
            "press": parts, "allocator": {"_target_": allocator} | (leaves or {}), "scorer": {"_target_": scorer},
        }  # fmt: skip
        labels = {"press": press, "task": task, "model": "tiny", "mode": mode, "interval": 512, "seed": seed}
        labels |= {
            "scorer": scorer,
            "allocator": allocator,
            "budget": f"{budget} tokens",
            "num_sinks": 4,
            "num_recent": 32,
        }
        if press == "dense":
            labels |= dict.fromkeys(("scorer", "allocator", "budget", "num_sinks", "num_recent"))
        records = [
            record(index, press, scorer, budget, seed, f"s{index}" in failed, index < bound if bound > 1 else bound)
            for index in range(shard, samples, num_shards)
        ]
        for made in records:
            if "metrics" in made:
                made["metrics"] |= metrics(made["id"]) if callable(metrics) else metrics or {}
                made["answers"] = made["answers"] if asked else []
        folder = tmp_path / "runs" / folder_name([task, press, scorer, str(budget)], config)
        folder.mkdir(parents=True)
        # JSON is YAML, and keeps the fixture without an emitter.
        write_text(folder / "config.yaml", json.dumps(config))
        write_text(folder / "predictions.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        write_text(folder / "metrics.json", json.dumps(summary(records, labels, skipped)))
        if arrays and press == "ams":
            save_cache(folder / "kept_positions.npz", budget)
        if arrays and press == "community":
            save_regions(folder / "regions.npz")
        return folder

    return make


def record(index, press, scorer, budget, seed, failed, bound):
    rng = random.Random(f"{index} {press} {scorer} {budget} {seed}")
    answers = [
        {
            "gold": ["1"],
            "meta": {"depth": depth},
            **({} if press == "dense" else {"pressed": {"text": "", "score": float(rng.random() < 0.6)}}),
            "dense": {"text": "", "score": float(rng.random() < 0.9)},
        }
        for depth in (0.05, 0.45, 0.95)
    ]
    known = {"id": f"s{index}", "meta": {}, "context_tokens": 2040, "answers": answers}
    if failed:
        return {
            "id": f"s{index}",
            "meta": {},
            "context_tokens": 2040,
            "error": "the dense model's logits are not finite",
        }
    mean = lambda side: sum(answer[side]["score"] for answer in answers) / 3
    metrics = {
        "dense_accuracy": mean("dense"),
        "dense_kv_bytes": 3e8,
        "dense_decode_tokens_per_second": 20 + rng.random(),
    }
    size = budget if isinstance(budget, int) else 512
    if press != "dense":
        metrics |= {
            "accuracy": mean("pressed"), "kl": rng.uniform(0.1, 0.4) * 64 / size, "events": 3 if bound else 0,
            "kv_bytes": 1e6 * size, "mean_slots": size + 256, "dense_mean_slots": 1600,
            "decode_tokens_per_second": 30 + rng.random(), "event_time_share": 0.03, "peak_slots": size + 512,
            "mean_kv_bytes": 9e5 * size, "auxiliary_bytes": 3e7, "peak_process_bytes": 2e9, "prefill_seconds": 1.5,
        }  # fmt: skip
    return known | {"metrics": metrics}


def save_cache(path, budget):
    rng = np.random.default_rng(0)
    seen = np.array([1024, 1536, 2048])
    arrays = {"sample": np.array("s0"), "seen_tokens": seen}
    for layer in range(3):
        kept = np.stack([[np.sort(rng.choice(tokens, budget, False)) for _ in range(2)] for tokens in seen])
        edges = np.sort(rng.choice(np.arange(1, 700), (3, 2, 9), True), axis=-1)
        edges = np.concatenate((np.zeros((3, 2, 1)), edges + np.arange(9), np.full((3, 2, 1), 768)), axis=-1)
        arrays[f"layer_{layer}"] = kept.astype(np.int32)
        arrays[f"boundaries_{layer}"] = edges.astype(np.int32)
        arrays[f"quotas_{layer}"] = np.minimum(np.diff(edges), budget / 10).astype(np.int32)
        arrays[f"masses_{layer}"] = rng.random((3, 2, 10)).astype(np.float32)
    np.savez_compressed(path, **arrays)


def save_regions(path):
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.permutation(80), 25)[None].astype(np.int32).repeat(2, axis=0)
    labels[:, :10] = -1
    np.savez_compressed(path, sample=np.array("s0"), labels_1=labels, modularity_1=np.array(0.61))


@pytest.fixture
def full_set(make_run):
    """What a sweep leaves: three methods, three budgets, two seeds of one of them, two lengths, the dense model alone."""
    for budget in (64, 128, 256):
        for seed in (1, 2):
            make_run(budget=budget, seed=seed)
        make_run(press="topk", scorer="keydiff", allocator="global_topk", budget=budget, seed=1)
        make_run(press="community", scorer=None, allocator="community", budget=budget, seed=1)
    make_run(press="topk", scorer="tova", allocator="global_topk", budget=128, length=4096, seed=1)
    return make_run(press="dense", scorer=None, allocator=None, seed=1).parent
