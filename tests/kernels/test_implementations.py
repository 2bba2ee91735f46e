"""The reference path needs torch alone, an explicit choice never falls back, and the kernels compile without a GPU."""

import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from kvstitch.kernels.common.dispatch import resolve_implementation

WITHOUT_TRITON = """
import os, sys

sys.modules["triton"] = None
import torch
from kvstitch.kernels.community_update import Communities, community_update
from kvstitch.kernels.compact import compact
from kvstitch.kernels.segment_quota.api import segment_plan, segment_select
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.kernels.sparse_decode import sparse_decode
from kvstitch.kernels.topk_attention import topk_attention, topk_edges

query, keys = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
topk_attention(query, keys, keys, 0.3, 2)
topk_edges(query, keys, 0.3, 2)
slots = torch.tensor([[[0, 2], [1, 4]]])
sparse_decode(query[:, :, :1], keys, keys, slots, 0.3, top_k=1)
compact([keys], slots)
rules = SegmentRules(
    segment_mass=0.3, min_segment_tokens=1, max_segment_tokens=4, min_keep_tokens=1, credit_decay=0.9, credit_mix=0.9,
    num_sinks=1, num_recent=1, must_keep="first_counted", must_priority="sink", boundary="include", split="even",
    merge="forward", quota="waterfill", credit=True, credit_init="zero", credit_scale="mass", batch="per_sample",
    mass_dtype="float64",
)
plan = segment_plan(torch.rand(1, 2, 6), None, torch.tensor([3]), 3, None, rules)
segment_select(torch.rand(1, 2, 6), plan.slot_edges, plan.quotas, *plan[-2:], None, "first_counted", 3)
ints = lambda *shape: torch.zeros(shape, dtype=torch.int32)
degrees, totals = torch.ones(1, 2, 3), torch.ones(1, 2)
state = Communities(ints(1, 2, 6), torch.zeros(1, 2, 3, 8), ints(1, 2, 3), degrees, totals, ints(1, 2))
community_update(state, keys[:, :, 0], torch.tensor([5]), slots, torch.rand(1, 2, 2), 1.0)
assert not [name for name in sys.modules if ".triton" in name and name.startswith("kvstitch")]
for interpret in "01":
    os.environ["TRITON_INTERPRET"] = interpret
    try:
        topk_edges(query, keys, 0.3, 2, impl="triton")
    except (ValueError, ImportError) as error:
        print(type(error).__name__)
"""


def test_reference_runs_where_triton_cannot_be_imported():
    """An explicit "triton" fails there: for want of a GPU, or, where the interpreter would do, of Triton."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ValueError", "ModuleNotFoundError"]


def test_auto_follows_the_device():
    assert resolve_implementation("auto", torch.zeros(1)) == "reference"
    assert resolve_implementation("reference", torch.zeros(1)) == "reference"
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert resolve_implementation("auto", on_gpu) == resolve_implementation("triton", on_gpu) == "triton"
    assert resolve_implementation("reference", on_gpu) == "reference"


def test_kernels_compile_without_spills_for_both_targets():
    """bfloat16 at head dims 64 and 128; `python -m kvstitch.kernels.compile_matrix` compiles everything."""
    if sys.platform != "linux":
        pytest.skip("Triton exists for Linux only")
    done = subprocess.run(
        [sys.executable, "-m", "kvstitch.kernels.compile_matrix", "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:-1]]
    kernels = {"topk_attention_fwd", "group_topk_fwd", "merge_heads", "sparse_decode_split", "top_slots", "compact"}
    kernels |= {"community_update", "segment_plan", "segment_select"}
    assert kernels <= {row[0] for row in rows}
    assert {target for row in rows for target in row if target.startswith("sm_")} == {"sm_80", "sm_90"}
    assert {row[2] for row in rows if row[1] == "bfloat16"} == {"64", "128"}


WHOLE_MATRIX = """
from kvstitch.kernels.compile_matrix import matrix

for case in matrix():
    arguments = case.launch.arguments
    constant = lambda *names: next((arguments[name] for name in names if name in arguments), None)
    kernel, (first, *_) = case.launch.kernel.__name__, arguments.values()
    tensor = arguments.get("key", arguments.get("query", arguments.get("output", first)))
    dtype = str(tensor.dtype).removeprefix("torch.")
    print(kernel, dtype, constant("HEAD_DIM", "WIDTH"), constant("TOP_K"), constant("GROUP", "ROWS"))
"""


def test_the_whole_matrix_leaves_no_combination_out():
    """Nothing is compiled here; `python -m kvstitch.kernels.compile_matrix` does that, and takes its time."""
    if sys.platform != "linux":
        pytest.skip("Triton exists for Linux only")
    done = subprocess.run([sys.executable, "-c", WHOLE_MATRIX], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    by_head_dim = ["topk_attention_fwd", "group_topk_fwd", "sparse_decode_split", "merge_splits", "compact"]
    wanted = product([*by_head_dim, "community_update"], ["bfloat16", "float16", "float32"], [64, 80, 96, 128, 256])
    named = {(row[0].strip("_").removesuffix("_kernel"), row[1], row[2]) for row in rows}
    assert {(kernel, dtype, str(head_dim)) for kernel, dtype, head_dim in wanted} <= named
    for kernel in ("_topk_attention_fwd_kernel", "_group_topk_fwd_kernel", "_merge_heads_kernel"):
        assert {"2", "4", "8", "16", "32"} <= {row[3] for row in rows if row[0] == kernel}
    # Of a group of five query heads, which is no power of two, beside one of four.
    for kernel in ("_group_topk_fwd_kernel", "_merge_heads_kernel", "_sparse_decode_split_kernel", "_top_slots_kernel"):
        assert {"4", "5"} <= {row[4] for row in rows if row[0] == kernel}
