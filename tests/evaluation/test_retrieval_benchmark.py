"""The retrieval benchmarks on tiny shapes: they run, decode what they say, and report consistent figures."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import kvstitch.configs
from kvstitch.allocators.retrieval import CommunityRetrieval
from kvstitch.evaluation.benchmarks import retrieval_prefill
from kvstitch.evaluation.benchmarks.retrieval import DecodeBenchmark, RetrievalBenchmark, UpdateBenchmark
from kvstitch.evaluation.benchmarks.retrieval_parts import (
    MadeUpCommunities,
    PressedDecoder,
    StockDecoder,
    bandwidth,
    index_share,
)
from kvstitch.evaluation.benchmarks.retrieval_prefill import PrefillBenchmark
from kvstitch.evaluation.models import LoadedModel
from kvstitch.presses.retrieval import RetrievalPress

TINY = dict(
    contexts=(200,), budget=64, rounds=2, steps=2, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=16, vocab_size=50,
)  # fmt: skip


@pytest.fixture
def quiet(recwarn):
    return recwarn


def test_decode_rows(quiet):
    rows = DecodeBenchmark(**TINY).run()
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    for row in rows:
        assert row["kind"] == "decode" and row["context"] == 200 and row["budget"] == 64
        assert all(row[f"{name}_ms"] > 0 for name in ("stock", "dense", "retrieval", "rest", "floor"))
        assert row["stock_to_retrieval"] == pytest.approx(row["stock_ms"] / row["retrieval_ms"], rel=0.1)
        assert row["retrieval_to_floor"] == pytest.approx(row["retrieval_ms"] / row["floor_ms"], rel=0.1)
        assert row["dense_to_floor"] == pytest.approx(row["dense_ms"] / row["dense_floor_ms"], rel=0.1)
        assert row["dense_floor_ms"] >= row["rest_ms"] and 0 < row["index_share"]


def test_contestants_do_what_they_are_called(quiet):
    """The dense one reads everything and agrees with the stock cache; the other reads its budget."""
    bench = DecodeBenchmark(**TINY)
    model = bench._model()
    keys, values = bench._storage(200, torch.float32)
    communities = MadeUpCommunities(CommunityRetrieval.recommended(), 16)
    stock = StockDecoder(model, keys, values, 3)
    dense = PressedDecoder(model, keys, values, 3, RetrievalPress(communities, budget=1.0))
    sparse = PressedDecoder(model, keys, values, 3, RetrievalPress(communities, 64))
    stock.decode()
    assert dense._run.num_sparse_steps == 0 and sparse._run.num_sparse_steps == 3
    for ours, theirs in zip(dense.cache.layers, stock.cache.layers):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5)
    run = sparse._enter()
    sparse._decode_pressed(run)
    assert sparse.cache.layers[0].keys.shape[2] == 206
    row_bytes = 2 * 8 * 4
    layers = 2
    assert sparse.bytes_read() > 64 * 2 * row_bytes * layers
    assert 0 < sparse.index_share() < 1


def test_update_rows():
    (row,) = UpdateBenchmark(lengths=(64, 256), rounds=2, repeats=2).run()
    assert row["us_at_64"] > row["floor_us"] > 0
    assert row["at_64_to_floor"] == pytest.approx(row["us_at_64"] / row["floor_us"], rel=0.2)
    assert row["at_256_to_floor"] == pytest.approx(row["us_at_256"] / row["floor_us"], rel=0.2)
    assert row["last_to_first"] == pytest.approx(row["us_at_256"] / row["us_at_64"], rel=0.05)


@pytest.fixture
def prefill(tiny, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + i * i % 90}" for i in range(200)))
    load = lambda dtype: LoadedModel(tiny.model.to(getattr(torch, dtype)), tiny.tokenizer)
    monkeypatch.setattr(retrieval_prefill, "load_smollm2", load)
    return PrefillBenchmark(
        CommunityRetrieval(top_k=3), tokens=160, dtypes=("float32", "bfloat16"), budget=48, text=str(text), rounds=2
    )


def test_prefill_rows(quiet, prefill):
    rows = prefill.run()
    assert [(row["kind"], row["dtype"], row["tokens"]) for row in rows] == [("prefill", x, 160) for x in prefill.dtypes]
    for row in rows:
        assert row["floor_sec"] >= row["dense_sec"] and row["pressed_to_floor"] > 0
        assert row["processor_overhead"] > -1 and row["background_sec"] >= 0
    # Half of the bytes have more than half of an index beside them: slots are whole numbers.
    assert 1 < rows[1]["index_share"] / rows[0]["index_share"] < 2.1


def test_the_share_is_of_everything_that_stays_over_what_is_in_use(quiet, tiny):
    with RetrievalPress(CommunityRetrieval.paper(top_k=3), 48)(tiny.model) as run, torch.no_grad():
        cache = tiny.model(torch.arange(3, 93)[None].repeat(1, 2), use_cache=True).past_key_values
        tiny.model(torch.tensor([[5]]), past_key_values=cache)
    in_use = 3 * 2 * 181 * 2 * 16 * 4
    share = index_share(cache)
    assert run.stored_bytes > in_use, "room for growth"
    assert share >= run.index_bytes / in_use > run.index_bytes / run.stored_bytes
    # Whatever else an index holds, in torch or in numpy, in whatever it holds.
    index = cache.layers[1].index.index
    index.kept = {"labels": [np.zeros(100, np.int64)[:50]]}
    index.growth.kept = torch.zeros(50)
    assert index_share(cache) == pytest.approx(share + (800 + 200) / in_use)


def test_the_configuration_times_what_the_classes_do():
    """Also an index of about the size that `recommended` builds."""
    config = OmegaConf.load(Path(kvstitch.configs.__file__).parent / "bench" / "retrieval.yaml")
    made = instantiate(config, _convert_="all")
    assert made.decode.tokens_per_region == DecodeBenchmark().tokens_per_region == 9
    for part, default in (
        (made.decode, DecodeBenchmark()),
        (made.update, UpdateBenchmark()),
        (made.prefill, PrefillBenchmark()),
    ):
        for field in dataclasses.fields(part):
            value, expected = getattr(part, field.name), getattr(default, field.name)
            assert value == (list(expected) if isinstance(expected, tuple) else expected), field.name


def test_parts_can_be_left_out():
    rows = RetrievalBenchmark(threads=1, decode=None, prefill=None, update=UpdateBenchmark((64,), 2, 1)).run()
    assert [row["kind"] for row in rows] == ["update"]


def test_bandwidth_is_a_speed():
    assert 1e8 < bandwidth(megabytes=8, repeats=3) < 1e13


@pytest.mark.parametrize(
    "options, message",
    [(dict(dtypes=("int8",)), "dtypes must be among"), (dict(contexts=(512,)), "longer than budget=1024")],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DecodeBenchmark(**options)


def test_a_prompt_is_read_in_dtypes_that_there_are():
    with pytest.raises(ValueError, match="dtypes must be among float32, bfloat16, got int8"):
        PrefillBenchmark(dtypes=("int8",))
