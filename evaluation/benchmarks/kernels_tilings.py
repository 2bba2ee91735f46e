"""The tilings that top-k attention could be launched with: what to tune by, on a GPU."""

from typing import Any

import torch
from torch import Tensor

from kvstitch.evaluation.benchmarks.kernels_checks import told_apart
from kvstitch.evaluation.benchmarks.kernels_operators import OperatorSizes, Timing, milliseconds
from kvstitch.evaluation.benchmarks.kernels_timing import median_seconds
from kvstitch.evaluation.benchmarks.timing import Contestant


def tiling_rows(sizes: OperatorSizes, timing: Timing) -> list[dict[str, Any]]:
    """One row a tiling, the best first. One whose result is not that of the launcher's choice, which the checks have
    passed, gets no time."""
    from kvstitch.kernels.topk_attention.triton import forward_tilings, group_tilings, topk_attention_triton

    workload = sizes.variants()["topk_attention"]["merged"]
    inputs, (_, _, dim) = workload.inputs(timing.device), sizes.attention
    tensors = (inputs["query"], inputs["key"], inputs["value"], dim**-0.5, sizes.top_k, workload.num_sinks)
    run = lambda mean, **tilings: topk_attention_triton(
        *tensors, "query_group", mean, None, None, None, None, **tilings
    )
    element = inputs["query"].element_size()
    choices = [("merged", {"tiling": tiling}) for tiling in forward_tilings(dim, sizes.top_k, element)]
    choices += [("exact", {"group_tiling": tiling}) for tiling in group_tilings(dim, sizes.top_k, element)]
    named = {(mean, _described(tilings)): (mean, tilings) for mean, tilings in choices}

    checked = {mean: run(mean) for mean in ("merged", "exact")}
    right = [name for name, (mean, tilings) in named.items() if same_attention(run(mean, **tilings), checked[mean])]
    contestants = {
        name: Contestant(lambda _, mean=named[name][0], tilings=named[name][1]: run(mean, **tilings)) for name in right
    }
    seconds = median_seconds(contestants, timing.rounds, timing.device)
    rows = [
        {
            "kind": "tiling",
            "variant": mean,
            "length": sizes.context,
            "tiling": tiling,
            "ms": milliseconds(seconds.get((mean, tiling))),
            "note": "" if (mean, tiling) in seconds else "not timed: wrong on this machine",
        }
        for mean, tiling in named
    ]
    return sorted(rows, key=lambda row: (row["variant"], bool(row["note"]), row["ms"] or 0))


def same_attention(found: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether outputs, weights and indices of top-k attention differ by the order of additions only.

    Probabilities are rounded to the dtype of the values relative to a running maximum that depends on the tiles, so an
    output may move by some roundings of its largest number; weights are float32 throughout. NaN is never the same.
    """
    output, weights = ((one.float() - other.float()).abs().amax().item() for one, other in zip(found[:2], wanted[:2]))
    roundings = 4 * torch.finfo(wanted[0].dtype).eps * wanted[0].abs().amax().item()
    other_keys = ((found[2] != wanted[2]) & told_apart(wanted[1])).any()
    return output <= roundings and weights <= 1e-5 and not bool(other_keys)


def _described(tilings) -> str:
    (tiling,) = tilings.values()
    return f"{tiling.block_m}x{tiling.block_n}, {tiling.num_warps} warps, {tiling.num_stages} stages"
