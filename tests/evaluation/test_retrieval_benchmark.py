"""The retrieval benchmarks on tiny shapes: they run, decode what they say, and report consistent figures."""

import pytest
import torch

from kvstitch.allocators.retrieval import CommunityRetrieval
from kvstitch.evaluation.benchmarks.retrieval import DecodeBenchmark, RetrievalBenchmark, UpdateBenchmark
from kvstitch.evaluation.benchmarks.retrieval_parts import MadeUpCommunities, PressedDecoder, StockDecoder, bandwidth
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
    assert row["last_to_first"] == pytest.approx(row["us_at_256"] / row["us_at_64"], rel=0.05)


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
