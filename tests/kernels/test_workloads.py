"""The bench workloads: their YAML states the defaults, their inputs fit the operators, their floors are countable."""

import dataclasses
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

import kvstitch.configs
from kvstitch.evaluation.benchmarks.kernels_operators import KernelBenchmark

OPERATORS = ("community_update", "compact", "segment_quota", "sparse_decode", "topk_attention")
SMALL = {
    "community_update": dict(batch=2, heads=2, length=50, head_dim=8, capacity=6, edges=3),
    "compact": dict(batch=2, heads=2, length=40, head_dim=8, kept=15, dtype="float32"),
    "segment_quota": dict(batch=2, heads=2, keep=100, interval=60),
    "sparse_decode": dict(batch=2, query_heads=4, heads=2, length=40, head_dim=8, budget=15, dtype="float32"),
    "topk_attention": dict(batch=2, query_heads=4, heads=2, tokens=30, head_dim=8, top_k=3, dtype="float32"),
}


def bench(operator):
    return OmegaConf.load(Path(kvstitch.configs.__file__).parent / "bench" / f"{operator}.yaml")


def load(operator):
    return bench(operator)["workload"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_yaml_states_the_defaults_of_python(operator):
    config = load(operator)
    default = KernelBenchmark(get_class(config["_target_"])())
    assert set(bench(operator)) - {"_target_"} == {field.name for field in dataclasses.fields(KernelBenchmark)}
    assert instantiate(bench(operator)) == default
    assert set(config) - {"_target_"} == {field.name for field in dataclasses.fields(get_class(config["_target_"]))}
    assert instantiate(config) == get_class(config["_target_"])()


@pytest.mark.parametrize("operator", OPERATORS)
def test_inputs_fit_the_operator(operator):
    workload = instantiate(load(operator), **SMALL[operator])
    inputs = workload.inputs("cpu")
    result = workload.run(inputs, impl="reference")
    if operator == "topk_attention":
        assert (result.output - workload.baseline(inputs)).abs().max() < 1e-5
    if operator == "sparse_decode":
        everything = dataclasses.replace(workload, budget=40, top_k=0)
        inputs = everything.inputs("cpu")
        dense = everything.baseline(inputs).reshape(2, 4, 1, 8)
        assert (everything.run(inputs, impl="reference").output - dense).abs().max() < 1e-5
    if operator == "compact":
        fresh = workload.inputs("cpu")
        keys, values = workload.baseline(fresh)
        assert (inputs["keys"][:, :, :15] == keys).all() and (inputs["values"][:, :, :15] == values).all()
        assert (inputs["positions"][:, :, :15] == fresh["slots"]).all()
    if operator == "segment_quota":
        assert result.shape == (2, 2, 100) and (result.diff(dim=-1) > 0).all() and (result[..., -32:] >= 128).all()
    if operator == "community_update":
        assert (result >= 0).all() and (inputs["communities"].labels[..., -1] == result).all()


def test_floors_count_each_number_once():
    attention = instantiate(load("topk_attention"), **SMALL["topk_attention"])
    assert attention.floor_flops() == 2 * 4 * sum(range(1, 31)) * (2 * 8 + 2 * 8)
    # Queries and output 4 heads each, keys and values 2 each; three pairs of weight and index for each graph head.
    assert attention.floor_bytes() == 2 * 30 * ((4 + 4 + 2 + 2) * 8 * 4 + 2 * 3 * 8)
    decode = instantiate(load("sparse_decode"), **SMALL["sparse_decode"])
    assert decode.floor_bytes() == 2 * 2 * 15 * (8 * 4 + 8 * 4 + 8)
    event = instantiate(load("segment_quota"), **SMALL["segment_quota"])
    assert event.floor_bytes() == 2 * 2 * (160 * 4 + 160 * 4 + 100 * 4 + 160 * 8 + 100 * 8)
    moved = instantiate(load("compact"), **SMALL["compact"])
    assert moved.floor_bytes() == 2 * 2 * 15 * (2 * (8 * 4 + 8 * 4 + 8) + 8)
