"""Each kernel next to what it must beat and to the floor under it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvstitch.evaluation.benchmarks.kernels_checks import CHECKS, Setting, check_row
from kvstitch.evaluation.benchmarks.kernels_timing import Rates, measure_rates, median_seconds, resolve_device
from kvstitch.evaluation.benchmarks.timing import Contestant
from kvstitch.evaluation.options import check_least, check_types
from kvstitch.kernels.community_update.workload import CommunityUpdateWorkload
from kvstitch.kernels.compact.workload import CompactWorkload
from kvstitch.kernels.segment_quota.workload import SegmentQuotaWorkload
from kvstitch.kernels.sparse_decode.workload import SparseDecodeWorkload
from kvstitch.kernels.topk_attention.workload import TopKAttentionWorkload

# What `Workload.baseline` is, where there is one.
_BASELINES = {"topk_attention": "sdpa", "sparse_decode": "dense sdpa", "compact": "gather"}
_OPERATORS = {
    TopKAttentionWorkload: "topk_attention",
    SparseDecodeWorkload: "sparse_decode",
    CompactWorkload: "compact",
    SegmentQuotaWorkload: "segment_quota",
    CommunityUpdateWorkload: "community_update",
}


class Workload(Protocol):
    """One call of an operator; some also have `baseline(inputs)`."""

    def inputs(self, device: str, seed: int = 0) -> Mapping[str, Any]: ...

    def run(self, inputs: Mapping[str, Any], impl: str) -> object: ...

    def floor_flops(self) -> int: ...

    def floor_bytes(self) -> int: ...


@dataclass(frozen=True)
class Timing:
    """How things are timed here."""

    device: str
    impl: str
    rates: Rates
    rounds: int


@dataclass(frozen=True)
class OperatorSizes:
    """What the operators of one model work on at one context.

    Args:
        attention: query heads, kv heads and head dim.
        num_layers: stacked by the two operators that work on all layers at once.
        context: tokens.
        budget: slots that a step reads, or an event keeps.
        interval: tokens between events.
        top_k: edges of a query.
        dtype: name of a torch dtype.
    """

    attention: tuple[int, int, int]
    num_layers: int
    context: int
    budget: int
    interval: int
    top_k: int
    dtype: str

    def variants(self) -> dict[str, dict[str, Workload]]:
        """By operator and variant."""
        query_heads, heads, dim = self.attention
        shape = {"query_heads": query_heads, "heads": heads, "head_dim": dim, "dtype": self.dtype}
        prefill = TopKAttentionWorkload(tokens=self.context, top_k=self.top_k, **shape)
        decode = SparseDecodeWorkload(length=self.context, budget=self.budget, **shape)
        event = CompactWorkload(heads=heads, length=self.budget + self.interval, head_dim=dim, kept=self.budget)
        segments = SegmentQuotaWorkload(self.num_layers, heads, self.budget, self.interval)
        update = CommunityUpdateWorkload(
            self.num_layers, heads, self.context, dim, max(2, self.context // 32), self.top_k
        )
        return {
            "topk_attention": {
                "merged": prefill,
                "exact": dataclasses.replace(prefill, group_mean="exact"),
                "per_head": dataclasses.replace(prefill, aggregation="per_head"),
            },
            "sparse_decode": {
                "with weights": dataclasses.replace(decode, top_k=self.top_k),
                "output alone": dataclasses.replace(decode, top_k=0),
            },
            "compact": {"": dataclasses.replace(event, dtype=self.dtype)},
            "segment_quota": {"all layers": segments},
            "community_update": {"all layers": update},
        }


@dataclass(frozen=True)
class KernelCall:
    """Something to be timed.

    Args:
        operator, models, length: as its rows will name it.
        measure: gives the rows.
    """

    operator: str
    models: str
    length: int
    measure: Callable[[], list[dict[str, Any]]]

    def rows(self) -> list[dict[str, Any]]:
        try:
            return self.measure()
        except Exception as error:
            # As with whole models: memory that does not suffice, mostly, and the others are still worth their time.
            return [left_out(self.operator, self.models, self.length, f"failed: {type(error).__name__}: {error}")]


def left_out(operator: str, models: str, length: int, reason: str) -> dict[str, Any]:
    return {"kind": "left out", "operator": operator, "models": models, "length": length, "reason": reason}


def operator_rows(
    operator: str, variants: Mapping[str, Workload], models: str, length: int, timing: Timing, with_reference: bool
) -> list[dict[str, Any]]:
    """One row a variant. All take the inputs of the first, and the baseline is the first's.

    `ms` is the kernel's, on a CPU the reference's; `to_floor` says how many times the floor that is.
    """
    first = next(iter(variants.values()))
    inputs = first.inputs(timing.device)
    contestants = {
        name: Contestant(lambda _, workload=workload: workload.run(inputs, timing.impl))
        for name, workload in variants.items()
    }
    if operator in _BASELINES:
        contestants["baseline"] = Contestant(lambda _: first.baseline(inputs))
    if with_reference and timing.impl != "reference":
        contestants["reference"] = Contestant(lambda _: first.run(inputs, "reference"))
    seconds = median_seconds(contestants, timing.rounds, timing.device)
    rows = []
    for name, workload in variants.items():
        floor = timing.rates.floor_seconds(workload.floor_bytes(), workload.floor_flops())
        rows.append(
            {
                "kind": "kernel",
                "operator": operator,
                "variant": name,
                "models": models,
                "length": length,
                "impl": timing.impl,
                "ms": milliseconds(seconds[name]),
                "floor_ms": milliseconds(floor),
                "to_floor": round(seconds[name] / floor, 2),
                "baseline": _BASELINES.get(operator),
                "baseline_ms": milliseconds(seconds.get("baseline")),
                "to_baseline": round(seconds[name] / seconds["baseline"], 3) if "baseline" in seconds else None,
                "reference_ms": milliseconds(seconds.get("reference")),
            }
        )
    return rows


@dataclass(frozen=True)
class KernelBenchmark:
    """One call of one kernel: checked, then timed.

    Args:
        workload: the call.
        device: "auto" (a GPU if there is one), "cuda", "cpu" (times the reference).
        rounds: repeats, of which the median is taken.
    """

    workload: Workload
    device: str = "auto"
    rounds: int = 15

    def __post_init__(self):
        check_types(self, "bench")
        check_least(self, "bench", {"rounds": 1})

    def run(self) -> list[dict[str, Any]]:
        """The check's row and, unless it failed, the timing's."""
        device, operator = resolve_device(self.device), _OPERATORS[type(self.workload)]
        impl = "triton" if device == "cuda" else "reference"
        dtype = getattr(torch, getattr(self.workload, "dtype", "float32"))
        heads = self.workload.heads
        attention = (getattr(self.workload, "query_heads", heads), heads, getattr(self.workload, "head_dim", 64))
        check = check_row(operator, CHECKS[operator], Setting(attention, dtype, device, impl))
        if not check["passed"]:
            return [check]
        timing = Timing(device, impl, measure_rates(device, dtype), self.rounds)
        length = getattr(self.workload, "length", getattr(self.workload, "tokens", None)) or self.workload.keep
        return [check, *operator_rows(operator, {"": self.workload}, "", length, timing, with_reference=True)]


def shared_by(models: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Models of one attention shape together, since operators see little more of them: their names, and the first."""
    groups: dict[tuple, list[str]] = {}
    for name, shape in models.items():
        groups.setdefault(shape.attention, []).append(name)
    for names in groups.values():
        yield ", ".join(names), models[names[0]]


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1e3:.4g}")
