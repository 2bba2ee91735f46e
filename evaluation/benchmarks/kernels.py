"""The kernels on this machine: checked, then timed alone and in whole models; ends with one line of JSON.

    python scripts/bench.py bench=kernels
    python -m kvstitch.evaluation.benchmarks.kernels                # the same where Hydra is missing
    python -m kvstitch.evaluation.benchmarks.kernels --device=cpu   # tiny, on the reference path: shows that it runs

Needs torch, transformers and the packages that kvstitch itself imports, for a GPU Triton, and no network. Where kvstitch
is not installed, a link of that name to the repository does: `ln -s "$PWD" /tmp/kvstitch` and `PYTHONPATH=/tmp`.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import transformers

from kvstitch.evaluation.benchmarks.kernels_checks import Setting, check_rows
from kvstitch.evaluation.benchmarks.kernels_decode import USES, DecodeSetting, decode_rows
from kvstitch.evaluation.benchmarks.kernels_models import SHAPES, ModelShape, random_model
from kvstitch.evaluation.benchmarks.kernels_operators import (
    KernelCall,
    OperatorSizes,
    Timing,
    left_out,
    operator_rows,
    shared_by,
)
from kvstitch.evaluation.benchmarks.kernels_tilings import tiling_rows
from kvstitch.evaluation.benchmarks.kernels_timing import measure_rates, resolve_device
from kvstitch.evaluation.environment import commit
from kvstitch.evaluation.options import check_counts, check_least, check_types

DTYPES = ("bfloat16", "float16", "float32")
# Operators whose work depends on the context; the others are timed once a shape.
_BY_CONTEXT = ("topk_attention", "sparse_decode", "community_update")
# Beside weights and cache: an index of query heads, and a layer's cache twice while it grows.
_MEMORY_FACTOR, _MEMORY_SPARE = 1.7, 4 * 2**30


@dataclass(frozen=True)
class KernelsBenchmark:
    """All kernels, and models of random weights that use them.

    Without a GPU a tiny version runs on the reference path; it says so, and its times say nothing about a GPU.

    Args:
        device: "auto" (a GPU if there is one), "cuda", "cpu".
        models: names out of qwen3-4b, qwen3-8b, qwen3-14b, llama-3.1-8b.
        contexts: tokens, for single kernels.
        reference_contexts: those at which the torch reference is timed too; at long ones top-k attention takes minutes.
        decode: pairs of model and context for whole models, in this order until the time is over.
        contestants: see `decode_rows`.
        budget: slots that a step reads, or an event keeps.
        interval: tokens between events.
        top_k: edges of a query.
        dtype: "bfloat16", "float16" or "float32".
        rounds: repeats of a kernel, of which the median is taken.
        steps: tokens that each contestant decodes under the clock.
        limit_sec: nothing is begun after this time; what is left out is listed.
        kernels_sec: single kernels come first, as long as this; then whole models, and the kernels that are left.
    """

    device: str = "auto"
    models: Sequence[str] = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "llama-3.1-8b")
    contexts: Sequence[int] = (8192, 32768, 65536, 131072)
    reference_contexts: Sequence[int] = (8192,)
    decode: Sequence[tuple[str, int]] = (
        ("qwen3-4b", 65536),
        ("qwen3-4b", 131072),
        ("qwen3-8b", 131072),
        ("qwen3-14b", 131072),
        ("llama-3.1-8b", 131072),
        ("qwen3-8b", 65536),
        ("llama-3.1-8b", 65536),
        ("qwen3-14b", 65536),
    )
    contestants: Sequence[str] = tuple(USES)
    budget: int = 4096
    interval: int = 512
    top_k: int = 8
    dtype: str = "bfloat16"
    rounds: int = 15
    steps: int = 16
    limit_sec: float | int = 270
    kernels_sec: float | int = 90

    def __post_init__(self):
        check_types(self, "bench")
        check_least(self, "bench", dict.fromkeys(("budget", "interval", "top_k", "rounds", "steps"), 1))
        check_counts("bench.contexts", self.contexts)
        check_counts("bench.reference_contexts", self.reference_contexts, may_be_empty=True)
        check_counts("the contexts of bench.decode", [context for _, context in self.decode], may_be_empty=True)
        _check_names("models", self.models, SHAPES)
        _check_names("decode", [name for name, _ in self.decode], SHAPES)
        _check_names("contestants", self.contestants, USES)
        _check_names("dtype", [self.dtype], DTYPES)
        lengths = [*self.contexts, *(context for _, context in self.decode)]
        if min(lengths) <= self.budget:
            raise ValueError(f"contexts must be longer than budget={self.budget}, got {min(lengths)}")

    def run(self) -> list[dict[str, Any]]:
        """Rows of the kinds device, check, kernel, tiling, decode and left out; an operator that is wrong has no times.

        Each also goes to stderr as soon as it is there: a run that is cut short leaves what it had.
        """
        device = resolve_device(self.device)
        sized = self if device == "cuda" else _tiny(self)
        rows = []
        for row in sized._rows(device):
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
        return rows

    def _rows(self, device: str) -> Iterator[dict[str, Any]]:
        start = time.monotonic()
        within = lambda seconds: time.monotonic() - start < min(seconds, self.limit_sec)
        dtype, impl = getattr(torch, self.dtype), "triton" if device == "cuda" else "reference"
        timing = Timing(device, impl, measure_rates(device, dtype), self.rounds)
        yield _device_row(timing, self.dtype)
        red = set()
        for _, shape in shared_by({name: SHAPES[name] for name in self.models}):
            for row in check_rows(Setting(shape.attention, dtype, device, impl)):
                red |= set() if row["passed"] else {row["operator"]}
                yield row
        late: list[KernelCall] = []
        for call in self._kernel_calls(timing):
            if call.operator in red:
                yield left_out(call.operator, call.models, call.length, "wrong on this machine")
            elif within(self.kernels_sec):
                yield from call.rows()
            else:
                late.append(call)
        yield from self._decode_rows(device, sorted(red), lambda: within(self.limit_sec))
        for call in late:
            if within(self.limit_sec):
                yield from call.rows()
            else:
                yield left_out(call.operator, call.models, call.length, "no time")

    def _kernel_calls(self, timing: Timing) -> Iterator[KernelCall]:
        """By context, the shortest first; at the end what only tunes."""
        shared = [
            (names, lambda context, shape=shape: self._sizes(shape, context))
            for names, shape in shared_by({name: SHAPES[name] for name in self.models})
        ]
        for context in self.contexts:
            for names, sizes in shared:
                for operator, variants in sizes(context).variants().items():
                    if context != self.contexts[0] and operator not in _BY_CONTEXT:
                        continue
                    length = context if operator in _BY_CONTEXT else self.budget + self.interval
                    reference = context in self.reference_contexts or operator != "topk_attention"
                    rows = partial(operator_rows, operator, variants, names, length, timing, reference)
                    yield KernelCall(operator, names, length, rows)
        for names, sizes in shared if timing.device == "cuda" else ():
            first = sizes(self.contexts[0])
            yield KernelCall("topk_attention", names, first.context, partial(tiling_rows, first, timing))

    def _sizes(self, shape: ModelShape, context: int) -> OperatorSizes:
        numbers = (context, self.budget, self.interval, self.top_k)
        return OperatorSizes(shape.attention, shape.num_layers, *numbers, self.dtype)

    def _decode_rows(self, device: str, red: Sequence[str], enough_time) -> Iterator[dict[str, Any]]:
        memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        for name, pairs in groupby(self.decode, key=lambda pair: pair[0]):
            contexts, shape = [context for _, context in pairs], SHAPES[name]
            fitting = [context for context in contexts if memory is None or _bytes_needed(shape, context) < memory]
            for context in sorted(set(contexts) - set(fitting)):
                yield left_out("decode", name, context, "no memory")
            if not fitting or not enough_time():
                for context in fitting:
                    yield left_out("decode", name, context, "no time")
                continue
            model = random_model(shape, max(fitting) + 1024, getattr(torch, self.dtype), device)
            for context in fitting:
                setting = DecodeSetting(model, shape, context, self.budget, self.interval, self.steps)
                yield from decode_rows(name, setting, self.contestants, red, enough_time)
            # Before the next one is made.
            del model, setting


def _tiny(benchmark: KernelsBenchmark) -> KernelsBenchmark:
    """The same on shapes that a CPU does in seconds."""
    return dataclasses.replace(
        benchmark,
        models=("tiny",),
        contexts=(256, 320),
        reference_contexts=(),
        decode=(("tiny", 320),),
        budget=96,
        interval=32,
        top_k=4,
        rounds=min(benchmark.rounds, 2),
        steps=min(benchmark.steps, 2),
    )


def _device_row(timing: Timing, dtype: str) -> dict[str, Any]:
    on_gpu = timing.device == "cuda"
    return {
        "kind": "device",
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "measures": "kernels on a GPU" if on_gpu else "NO GPU: reference path, tiny shapes; says nothing about a GPU",
        "dtype": dtype,
        "gigabytes_per_sec": round(timing.rates.bytes_per_sec / 1e9, 1),
        "teraflops": round(timing.rates.flops_per_sec / 1e12, 3),
        "triton": _triton_version() if on_gpu else None,
        "commit": commit(),
    }


def _triton_version() -> str:
    import triton

    return triton.__version__


def _bytes_needed(shape: ModelShape, context: int) -> float:
    return shape.weight_bytes + _MEMORY_FACTOR * context * shape.slot_bytes + _MEMORY_SPARE


def _check_names(option: str, names: Sequence[str], allowed) -> None:
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(f"{option} must be among {', '.join(allowed)}, got {', '.join(unknown)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each kind of row as a table, then the line of JSON. Exit status 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--limit-sec", type=float, default=KernelsBenchmark.limit_sec, help="nothing begins after this")
    options = parser.parse_args(arguments)
    rows = KernelsBenchmark(device=options.device, limit_sec=options.limit_sec).run()
    for kind, same in groupby(sorted(rows, key=lambda row: row["kind"]), key=lambda row: row["kind"]):
        print(f"\n{kind}\n{_plain_table(list(same))}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"bench": "kernels", "machine": versions | {"python": platform.python_version()}, "rows": rows}))
    return 0 if all(row.get("passed", True) for row in rows) else 1


def _plain_table(rows: Sequence[dict[str, Any]]) -> str:
    columns = [column for column in rows[0] if column != "kind"]
    cells = [columns, *([str(row[column]) if row[column] is not None else "-" for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


if __name__ == "__main__":
    sys.exit(main())
