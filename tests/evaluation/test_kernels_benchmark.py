"""The kernel benchmark on the reference path: it runs where little is installed, checks first, and never claims a GPU."""

import dataclasses
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import kvstitch.configs
from kvstitch.evaluation.benchmarks import kernels, kernels_checks
from kvstitch.evaluation.benchmarks.kernels import KernelsBenchmark, main
from kvstitch.evaluation.benchmarks.kernels_checks import CHECKS, Difference, Setting, check_row, check_rows
from kvstitch.evaluation.benchmarks.kernels_decode import USES, DecodeSetting, _beside, decode_rows
from kvstitch.evaluation.benchmarks.kernels_models import SHAPES, random_model
from kvstitch.evaluation.benchmarks.kernels_operators import KernelBenchmark, OperatorSizes, operator_rows
from kvstitch.evaluation.benchmarks.kernels_tilings import same_attention
from kvstitch.evaluation.benchmarks.kernels_timing import Rates, resolve_device
from kvstitch.kernels.compact.workload import CompactWorkload
from kvstitch.kernels.topk_attention import topk_attention

# What a machine that only runs kernels may lack: what evaluation needs, the command line, and Leiden.
MISSING = (
    "kvpress", "datasets", "rich", "gguf", "math_verify", "matplotlib", "hydra", "omegaconf", "graspologic_native", "triton"
)  # fmt: skip
SCRIPT = Path(kvstitch.configs.__file__).parents[1] / "scripts" / "bench.py"
ALONE = f"""
import runpy, sys

sys.modules |= dict.fromkeys({MISSING})
# As if kvstitch were not installed either: what makes an editable installation importable is taken away.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.path[:] = [{str(SCRIPT.parent)!r}, *(entry for entry in sys.path if "__editable__" not in entry)]
sys.argv = ["bench.py", *sys.argv[1:]]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
TINY = Setting((4, 2, 16), torch.float32, "cpu", "reference")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def run_alone(*arguments):
    """`scripts/bench.py` on a machine that has neither the packages nor an installed kvstitch."""
    command = [sys.executable, "-W", "error:.*kvstitch.*", "-c", ALONE, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def alone():
    """The whole benchmark in a process of its own."""
    done = run_alone("bench=kernels", "bench.device=cpu")
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def printed(alone):
    return alone.stdout


@pytest.fixture(scope="module")
def rows(printed):
    return json.loads(printed.splitlines()[-1])["rows"]


@pytest.mark.parametrize("arguments", [["bench=event"], ["bench=kernels", "bench.rounds=3"], []])
def test_without_hydra_anything_else_is_refused_in_one_message(arguments):
    done = run_alone(*arguments)
    assert done.returncode == 1 and "hydra is not installed" in done.stderr and "Traceback" not in done.stderr


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def test_it_says_that_it_measured_no_gpu(printed, rows):
    (device,) = of_kind(rows, "device")
    assert device["measures"].startswith("NO GPU") and "NO GPU" in printed.split("{")[0]
    assert {row["impl"] for row in rows if "impl" in row} == {"reference"}
    assert not of_kind(rows, "tiling") and not of_kind(rows, "left out")


def test_what_is_found_is_said_at_once(alone, rows):
    """On stderr, in the order in which it is done: checks, single kernels, whole models."""
    assert [json.loads(line) for line in alone.stderr.splitlines() if line.startswith("{")] == rows
    assert [kind for kind, _ in groupby(row["kind"] for row in rows)] == ["device", "check", "kernel", "decode"]


def test_every_kernel_is_checked_and_timed(rows):
    assert [row["operator"] for row in of_kind(rows, "check")] == list(CHECKS)
    assert all(row["passed"] and row["cases"] > 1 for row in of_kind(rows, "check"))
    timed = of_kind(rows, "kernel")
    assert {row["operator"] for row in timed} == set(CHECKS)
    assert {row["variant"] for row in timed if row["operator"] == "topk_attention"} == {"merged", "exact", "per_head"}
    for row in timed:
        assert row["ms"] > 0 and row["to_floor"] == pytest.approx(row["ms"] / row["floor_ms"], rel=0.02, abs=0.01)
        if row["baseline"] is not None:
            assert row["to_baseline"] == pytest.approx(row["ms"] / row["baseline_ms"], rel=0.01, abs=0.001)


def test_every_contestant_decodes(rows):
    decoded = of_kind(rows, "decode")
    assert [row["contestant"] for row in decoded] == list(USES)
    dense = decoded[0]["step_ms"]
    for row in decoded:
        assert row["tokens_per_sec"] == pytest.approx(1e3 / row["step_ms"], rel=0.01)
        assert row["speedup"] == pytest.approx(dense / row["step_ms"], abs=0.01)
    by_name = {row["contestant"]: row for row in decoded}
    # Regions of two query heads, and beside them the order of each: the storage can follow one order alone.
    assert 2 < by_name["per_head"]["index_share"] / by_name["query_group"]["index_share"] < 2.6
    assert by_name["ams"]["event_ms"] > 0 and by_name["dense"]["event_ms"] is None
    assert all(row["peak_gib"] is None and row["peak_increase"] is None for row in decoded)


def test_a_red_kernel_is_named_and_not_timed(monkeypatch, capsys):
    def wrong(setting):
        yield Difference("fine", 0.0, 0.0)
        yield Difference("not a number", float("nan"), 1.0)

    def broken(setting):
        raise RuntimeError("no such instruction")

    right = Difference("right", 0.0, 0.0)
    checks = {name: lambda setting: iter((right, right)) for name in CHECKS}
    monkeypatch.setattr(kernels_checks, "CHECKS", checks | {"compact": wrong, "sparse_decode": broken})
    assert main(["--device=cpu"]) == 1
    last_line = capsys.readouterr().out.splitlines()[-1]
    rows = json.loads(last_line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["rows"]
    red = {row["operator"]: row["worst"] for row in of_kind(rows, "check") if not row["passed"]}
    assert red == {"compact": "not a number", "sparse_decode": "RuntimeError: no such instruction"}
    assert {row["operator"] for row in of_kind(rows, "kernel")} == set(CHECKS) - set(red)
    assert {(row["operator"], row["reason"]) for row in of_kind(rows, "left out")} == {
        (operator, "wrong on this machine") for operator in red
    }
    for row in of_kind(rows, "decode"):
        needs = [operator for operator in USES[row["contestant"]] if operator in red]
        assert (row["tokens_per_sec"] is None) == bool(needs)
        assert all(operator in row["note"] for operator in needs)


@pytest.mark.parametrize("operator", CHECKS)
def test_checks_notice_a_wrong_result(operator, monkeypatch):
    """One number of the result, or of what is changed in place, is off by a tenth, or a slot by one."""
    names = {"segment_quota": "SegmentQuotaWorkload", "community_update": "CommunityUpdateWorkload"}
    name = names.get(operator, operator)
    right = getattr(kernels_checks, name)
    spoil = lambda tensor: tensor.flatten()[-1:].add_(1 if not tensor.is_floating_point() else 0.1)

    class Spoiled(right if isinstance(right, type) else object):
        def run(self, inputs, impl):
            found = super().run(inputs, "reference")
            if impl == "other":
                spoil(found)
            return found

    def dispatch(*args, impl, **kwargs):
        found = right(*args, impl="reference", **kwargs)
        if impl == "other":
            spoil(args[0][0] if operator == "compact" else found[0])
        return found

    monkeypatch.setattr(kernels_checks, name, Spoiled if isinstance(right, type) else dispatch)
    assert check_row(operator, CHECKS[operator], TINY)["passed"]
    assert not check_row(operator, CHECKS[operator], TINY._replace(impl="other"))["passed"]


def test_checks_pass_in_bfloat16():
    assert all(row["passed"] for row in check_rows(TINY._replace(dtype=torch.bfloat16)))


def test_time_that_is_over_is_listed():
    rows = KernelsBenchmark(device="cpu", limit_sec=0).run()
    left_out = of_kind(rows, "left out")
    assert {row["operator"] for row in left_out} == {*CHECKS, "decode"}
    assert {row["reason"] for row in left_out} == {"no time"}
    assert not of_kind(rows, "kernel") and not of_kind(rows, "decode") and of_kind(rows, "check")


def test_kernels_whose_share_of_the_time_is_over_come_after_whole_models():
    rows = KernelsBenchmark(device="cpu", kernels_sec=0, contestants=("rest",)).run()
    assert [kind for kind, _ in groupby(row["kind"] for row in rows)] == ["device", "check", "decode", "kernel"]
    assert {row["operator"] for row in of_kind(rows, "kernel")} == set(CHECKS)


def test_a_kernel_that_fails_does_not_stop_the_next(monkeypatch):
    def fails(operator, *rest):
        if operator == "sparse_decode":
            raise torch.OutOfMemoryError("tried to allocate much")
        return operator_rows(operator, *rest)

    monkeypatch.setattr(kernels, "operator_rows", fails)
    rows = KernelsBenchmark(device="cpu", contestants=("rest",)).run()
    assert {row["operator"] for row in of_kind(rows, "kernel")} == set(CHECKS) - {"sparse_decode"}
    assert [row["reason"] for row in of_kind(rows, "left out")] == [
        "failed: OutOfMemoryError: tried to allocate much"
    ] * 2


def test_a_tiling_that_is_wrong_is_noticed():
    """Rounding is no difference; another output, another weight, another key, or NaN is."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 40, 16, generator=generator).bfloat16() for heads in (4, 2))
    wanted = tuple(topk_attention(query, key, key, 0.25, 4))
    nearly = tuple(topk_attention(query, key, key, 0.25 * (1 + 1e-6), 4))
    assert same_attention(wanted, wanted) and same_attention(nearly, wanted)
    for place, change in ((0, 0.2), (0, float("nan")), (1, 1e-3), (1, float("nan")), (2, 1)):
        spoiled = [tensor.clone() for tensor in wanted]
        spoiled[place][0, 0, 20, 0] += change
        assert not same_attention(tuple(spoiled), wanted)


def test_figures_stand_beside_those_of_the_dense_model():
    dense, other = {"step_ms": 20.0, "peak_gib": 40.0}, {"step_ms": 8.0, "peak_gib": 41.2}
    assert _beside(dense, other) == {"speedup": 2.5, "peak_increase": 0.03}
    assert _beside(None, other) == {"speedup": None, "peak_increase": None}


def test_a_contestant_may_be_left_out_alone():
    model = random_model(SHAPES["tiny"], 300, torch.float32, "cpu")
    setting = DecodeSetting(model, SHAPES["tiny"], 150, 96, 32, 1)
    answers = iter((True, False))
    first, second = decode_rows("tiny", setting, ("rest", "ams"), [], lambda: next(answers))
    assert first["tokens_per_sec"] > 0 and first["speedup"] is None
    assert second["tokens_per_sec"] is None and second["note"] == "left out: no time" and first.keys() == second.keys()


def test_a_contestant_that_fails_does_not_stop_the_next(monkeypatch):
    model = random_model(SHAPES["tiny"], 300, torch.float32, "cpu")
    setting = DecodeSetting(model, SHAPES["tiny"], 150, 96, 32, 1)

    def no_memory(self):
        raise torch.OutOfMemoryError("tried to allocate much")

    monkeypatch.setattr("kvstitch.presses.EvictionRun.compact", no_memory)
    first, second = decode_rows("tiny", setting, ("ams", "rest"), [], lambda: True)
    assert first["note"] == "failed: OutOfMemoryError: tried to allocate much" and first["step_ms"] is None
    assert second["note"] == "" and second["step_ms"] > 0


def test_yaml_states_the_defaults_of_python():
    leaf = OmegaConf.load(Path(kvstitch.configs.__file__).parent / "bench" / "kernels.yaml")
    assert set(leaf) - {"_target_"} == {field.name for field in dataclasses.fields(KernelsBenchmark)}
    built, default = (dataclasses.asdict(x) for x in (instantiate(leaf, _convert_="all"), KernelsBenchmark()))
    assert json.loads(json.dumps(built)) == json.loads(json.dumps(default))


def test_shapes_are_as_large_as_the_models_are_called():
    billions = {name: shape.weight_bytes / 2e9 for name, shape in SHAPES.items()}
    assert billions["qwen3-4b"] == pytest.approx(4.0, abs=0.05) and billions["qwen3-8b"] == pytest.approx(8.2, abs=0.05)
    assert billions["qwen3-14b"] == pytest.approx(14.8, abs=0.05)
    assert billions["llama-3.1-8b"] == pytest.approx(8.0, abs=0.05)
    tiny = SHAPES["tiny"]
    model = random_model(tiny, 10, torch.float32, "cpu")
    large = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert 2 * large == tiny.weight_bytes and tiny.slot_bytes == 2 * 2 * 16 * 2 * 2


def test_operators_get_the_shape_of_the_model():
    sizes = OperatorSizes((40, 8, 128), 40, 8192, 4096, 512, 8, "float16").variants()
    prefill, decode = sizes["topk_attention"]["exact"], sizes["sparse_decode"]["output alone"]
    assert (prefill.query_heads, prefill.heads, prefill.tokens, prefill.dtype) == (40, 8, 8192, "float16")
    assert (decode.budget, decode.length, decode.top_k) == (4096, 8192, 0)
    assert sizes["compact"][""].length == 4608 and sizes["segment_quota"]["all layers"].batch == 40


def test_one_kernel_alone():
    workload = CompactWorkload(heads=2, length=50, head_dim=8, kept=20, dtype="float32")
    check, timed = KernelBenchmark(workload, device="cpu", rounds=2).run()
    assert check["operator"] == timed["operator"] == "compact" and check["passed"] and timed["baseline"] == "gather"


def test_the_floor_is_the_slower_of_two_rates():
    rates = Rates(bytes_per_sec=100.0, flops_per_sec=1000.0)
    assert rates.floor_seconds(200, 100) == 2 and rates.floor_seconds(10, 3000) == 3


@NO_GPU
def test_devices():
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
        KernelsBenchmark(device="cuda").run()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(models=("gpt-2",)), "models must be among qwen3-4b.*got gpt-2"),
        (dict(contestants=("dense", "quest")), "contestants must be among.*got quest"),
        (dict(dtype="int8"), "dtype must be among bfloat16"),
        (dict(contexts=(4096,)), "longer than budget=4096, got 4096"),
        (dict(decode=(("tiny", 100),)), "longer than budget=4096, got 100"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KernelsBenchmark(**options)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'auto', 'cuda', 'cpu', got 'tpu'"):
        KernelBenchmark(CompactWorkload(), device="tpu").run()
