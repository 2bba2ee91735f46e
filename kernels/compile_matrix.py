"""Compiles every Triton kernel for sm_80 and sm_90 without a GPU and prints what the machine code takes.

    python -m kvstitch.kernels.compile_matrix            # every kernel, dtype and head dim
    python -m kvstitch.kernels.compile_matrix --quick    # bfloat16, head dims 64 and 128

Ends with status 1 if a kernel spills registers or needs more shared memory than a program may have.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvstitch.kernels.common.ahead_of_time import SHARED_LIMIT, Launch, Resources, compile_launch, record_launches
from kvstitch.kernels.common.tiling import Tiling
from kvstitch.kernels.community_update.api import Communities
from kvstitch.kernels.community_update.triton import community_update_triton
from kvstitch.kernels.compact.triton import compact_triton
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.kernels.segment_quota.triton import segment_plan_triton
from kvstitch.kernels.segment_quota.triton_select import segment_select_triton
from kvstitch.kernels.segment_quota.workload import RECOMMENDED_RULES, REFERENCE_RULES
from kvstitch.kernels.sparse_decode.triton import sparse_decode_triton
from kvstitch.kernels.topk_attention.triton import forward_tilings, group_tilings, topk_attention_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256)
# Qwen3-4B: 32 query heads over 8 kv heads; Qwen3-14B: 40. Nothing that is compiled depends on the lengths.
_BATCH, _QUERY_HEADS, _MORE_QUERY_HEADS, _HEADS, _LENGTH, _CHOSEN = 2, 32, 40, 8, 8192, 1024
# The two presets of mass segments that differ in every switch.
_SEGMENT_RULES = {
    "recommended": RECOMMENDED_RULES,
    "reference": REFERENCE_RULES,
}


@dataclass(frozen=True)
class Case:
    """One launch to compile, and how the table names it."""

    label: str
    launch: Launch


def matrix(quick: bool = False) -> list[Case]:
    """Every distinct launch of the kernels; `quick` is the part that the tests compile."""
    dtypes, head_dims = ((torch.bfloat16,), (64, 128)) if quick else (DTYPES, HEAD_DIMS)
    named = list(_segment_launchers(quick))
    for dtype in dtypes:
        for head_dim in head_dims:
            named += [(f"{str(dtype)[6:]} {head_dim} {name}", f) for name, f in _launchers(dtype, head_dim, quick)]
    cases = {}
    for name, launcher in named:
        for launch in record_launches(launcher):
            cases.setdefault(_identity(launch), Case(name, launch))
    return list(cases.values())


def compile_all(cases: list[Case], jobs: int = 1) -> Iterator[tuple[Case, Resources]]:
    """Both targets of each case, in order, as they are done."""
    # An unset default draws a warning from Triton 3.9; this is the behaviour of every version so far.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    work = [(case, capability) for case in cases for capability in SHARED_LIMIT]
    # Launches hold functions that do not pickle: a forked worker finds them by index.
    _WORK[:] = work
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for (case, _), resources in zip(work, pool.imap(_compile_one, range(len(work)))):
            yield case, resources


_WORK: list[tuple[Case, int]] = []


def _compile_one(index: int) -> Resources:
    case, capability = _WORK[index]
    return compile_launch(case.launch, capability)


def _launchers(dtype: torch.dtype, head_dim: int, quick: bool) -> Iterator[tuple[str, object]]:
    new = lambda *shape, dtype=dtype: _meta(*shape, dtype=dtype)
    query, key = new(_BATCH, _QUERY_HEADS, _LENGTH, head_dim), new(_BATCH, _HEADS, _LENGTH, head_dim)
    padding = new(_BATCH, dtype=torch.int64)

    def attention(
        aggregation, group_mean, top_k, value=key, first_key=None, softcap=None, sinks=None, logsumexp=None, **tilings
    ):
        model = (first_key, softcap, sinks, logsumexp)
        arguments = (query, key, value, 0.1, top_k, 10, aggregation, group_mean, *model)
        return lambda: topk_attention_triton(*arguments, **tilings)

    yield "top-8", attention("query_group", "merged", 8)
    found = new(*query.shape[:3], dtype=torch.float32)
    yield "top-8", attention("query_group", "exact", 8, value=None, logsumexp=found)
    if not quick:
        yield "plain", attention("query_group", "exact", 8)
        for top_k in (2, 4, 16, 32):
            yield f"top-{top_k}", attention("query_group", "exact", top_k)
            yield f"top-{top_k}", attention("query_group", "merged", top_k)
        yield "top-8, edges alone", attention("query_group", "exact", 8, value=None)
        yield "top-8, edges alone", attention("query_group", "merged", 8, value=None)
        options = dict(first_key=padding, softcap=50.0, sinks=new(_QUERY_HEADS))
        yield "top-8, all options", attention("query_group", "exact", 8, **options)
        yield "top-8, all options", attention("query_group", "merged", 8, **options)
        for tiling in forward_tilings(head_dim, 8, dtype.itemsize)[1:]:
            yield f"top-8, {_describe(tiling)}", attention("per_head", "exact", 8, tiling=tiling)
        for tiling in group_tilings(head_dim, 8, dtype.itemsize)[1:]:
            yield f"top-8, {_describe(tiling)}", attention("query_group", "exact", 8, group_tiling=tiling)

    step = new(_BATCH, _QUERY_HEADS, 1, head_dim)
    slots = new(_BATCH, _HEADS, _CHOSEN, dtype=torch.int64)
    decode = lambda top_k, *model: lambda: sparse_decode_triton(step, key, key, slots, 0.1, *model, top_k, 10)
    yield "decode", decode(8, None, None)
    if not quick:
        yield "decode, output alone", decode(0, None, None)
        yield "decode, all options", decode(32, 50.0, new(_QUERY_HEADS))
        yield from _uneven_group(dtype, head_dim)

    aligned = [key, new(_BATCH, _HEADS, _LENGTH, dtype=torch.int32)]
    yield "rows", lambda: compact_triton(aligned, slots, [None, -1])
    kept = [new(*slots.shape, *x.shape[3:], dtype=x.dtype) for x in aligned]
    yield "rows, new storage", lambda: compact_triton(aligned, slots, [0, -1], kept)
    yield "8 edges", lambda: _update(new, head_dim)


def _uneven_group(dtype: torch.dtype, head_dim: int) -> Iterator[tuple[str, object]]:
    """Five query heads a kv head, which is no power of two, and lists of slots for each of them."""
    new = lambda *shape, dtype=dtype: _meta(*shape, dtype=dtype)
    query, key = new(_BATCH, _MORE_QUERY_HEADS, _LENGTH, head_dim), new(_BATCH, _HEADS, _LENGTH, head_dim)
    for group_mean in ("exact", "merged"):
        arguments = (query, key, key, 0.1, 8, 10, "query_group", group_mean, None, None, None, None)
        yield "top-8, five heads", partial(topk_attention_triton, *arguments)
    for lists in (_HEADS, _MORE_QUERY_HEADS):
        slots = new(_BATCH, lists, _CHOSEN, dtype=torch.int64)
        arguments = (query[:, :, :1], key, key, slots, 0.1, None, None, 8, 10)
        yield f"decode, {lists} lists for {_MORE_QUERY_HEADS} heads", partial(sparse_decode_triton, *arguments)


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _segment_launchers(quick: bool) -> Iterator[tuple[str, object]]:
    """Before an event of 256 + 512 slots, of 4096 + 512, and after a prompt of 128k."""
    for slots, keep in ((768, 256),) if quick else ((768, 256), (4608, 4096), (131_072, 1024)):
        for name, rules in _SEGMENT_RULES.items():
            if not (quick and name != "recommended"):
                yield f"{slots} slots, {name}", partial(_segments, slots, keep, rules)


def _segments(slots: int, keep: int, rules: SegmentRules) -> None:
    heads = (_BATCH, _HEADS)
    usage, valid = _meta(*heads, slots, dtype=torch.float32), _meta(*heads, slots, dtype=torch.bool)
    credit = _meta(*heads, keep, dtype=torch.float32)
    plan = segment_plan_triton(usage, credit, _meta(_BATCH, dtype=torch.int64), valid, rules)
    protected = (plan.num_first, plan.first_recent)
    segment_select_triton(usage, plan.slot_edges, plan.quotas, *protected, valid, rules.must_keep, keep)


def _update(new, head_dim: int) -> None:
    shape, capacity = (_BATCH, _HEADS), 512
    communities = Communities(
        labels=new(*shape, _LENGTH, dtype=torch.int32),
        centroids=new(*shape, capacity, head_dim, dtype=torch.float32),
        sizes=new(*shape, capacity, dtype=torch.int32),
        degrees=new(*shape, capacity, dtype=torch.float32),
        total_degree=new(*shape, dtype=torch.float32),
        count=new(*shape, dtype=torch.int32),
    )
    edges = new(*shape, 8, dtype=torch.int32), new(*shape, 8, dtype=torch.float32)
    community_update_triton(communities, new(*shape, head_dim), new(_BATCH, dtype=torch.int64), *edges, 1.0, 0.5)


def _identity(launch: Launch) -> str:
    values = {
        name: (value.dtype if isinstance(value, torch.Tensor) else value) for name, value in launch.arguments.items()
    }
    return f"{launch.kernel.__name__} {values} {launch.options}"


def _describe(tiling: Tiling) -> str:
    return f"tile {tiling.block_m}x{tiling.block_n}, {tiling.num_warps} warps, {tiling.num_stages} stages"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="bfloat16, head dims 64 and 128 only")
    parser.add_argument("--jobs", type=int, default=1, help="compile this many at a time")
    options = parser.parse_args()
    print(f"{'kernel':28} {'case':58} {'target':7} {'warps':>5} {'registers':>9} {'spilled':>8} {'shared':>9}")
    over_budget = 0
    for case, found in compile_all(matrix(options.quick), options.jobs):
        over_budget += not found.within_budget
        verdict = "" if found.within_budget else "  OVER BUDGET"
        name = found.kernel.strip("_").removesuffix("_kernel")
        print(
            f"{name:28} {case.label:58} {'sm_' + str(found.capability):7} {found.num_warps:5} {found.registers:9} "
            f"{found.spill_bytes:6} B {found.shared_bytes / 1024:5.1f} KiB{verdict}",
            flush=True,
        )
    limits = ", ".join(f"sm_{capability}: {limit // 1024} KiB" for capability, limit in SHARED_LIMIT.items())
    print(f"{over_budget} over budget (no spills; {limits})")
    return 1 if over_budget else 0


if __name__ == "__main__":
    sys.exit(main())
