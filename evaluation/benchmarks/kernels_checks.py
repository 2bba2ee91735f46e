"""Whether the kernels are right on this machine; what is not is not timed."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstitch.kernels.community_update.workload import CommunityUpdateWorkload
from kvstitch.kernels.compact.api import compact
from kvstitch.kernels.segment_quota.workload import SegmentQuotaWorkload
from kvstitch.kernels.sparse_decode.api import sparse_decode
from kvstitch.kernels.topk_attention.api import topk_attention


class Setting(NamedTuple):
    """What all checks of one run share: attention is (query heads, kv heads, head dim)."""

    attention: tuple[int, int, int]
    dtype: torch.dtype
    device: str
    impl: str


class Difference(NamedTuple):
    """How far a result is from the truth, and how far it may be."""

    case: str
    error: float
    allowed: float


# Odd, more than one tile of every kernel, and quick for a reference in float64.
_QUERIES, _KEYS, _TOP_K, _SINKS = 301, 333, 8, 10


def check_rows(setting: Setting) -> list[dict[str, Any]]:
    """One row an operator: its worst case, measured by the error that it may make, and whether it passed."""
    return [check_row(name, check, setting) for name, check in CHECKS.items()]


def check_row(name: str, check: Callable[[Setting], Iterator[Difference]], setting: Setting) -> dict[str, Any]:
    query_heads, heads, head_dim = setting.attention
    row = {"kind": "check", "operator": name, "impl": setting.impl, "dtype": str(setting.dtype)[6:]}
    row |= {"query_heads": query_heads, "kv_heads": heads, "head_dim": head_dim}
    try:
        found = list(check(setting))
    except Exception as error:
        # Whatever a broken kernel raises makes it red; the others are still worth the time on a lent machine.
        return row | {"cases": 0, "worst": f"{type(error).__name__}: {error}", "worst_ratio": None, "passed": False}
    # NaN compares false, so it never passes, and is the worst of all.
    failed = [each for each in found if not each.error <= each.allowed]
    worst = max(failed or found, key=lambda each: each.error / max(each.allowed, 1e-30))
    ratio = worst.error / worst.allowed if worst.allowed else worst.error
    # JSON has no NaN and no infinity.
    ratio = round(ratio, 4) if math.isfinite(ratio) else None
    return row | {"cases": len(found), "worst": worst.case, "worst_ratio": ratio, "passed": not failed}


def check_topk_attention(setting: Setting) -> Iterator[Difference]:
    """Output, weights and keys against float64; a key is compared where its neighbours in the order are well apart."""
    new, (query_heads, heads, dim) = _random(setting), setting.attention
    query, key, value = new(1, query_heads, _QUERIES, dim), new(1, heads, _KEYS, dim), new(1, heads, _KEYS, dim)
    padding = torch.tensor([40], device=setting.device)
    model = {"first_key": padding, "softcap": 30.0, "sink_logits": new(query_heads)}
    cases = {
        "merged": {"group_mean": "merged"},
        "exact": {"group_mean": "exact"},
        "per head": {"aggregation": "per_head"},
        "padding, soft cap and sink logits": model | {"group_mean": "merged"},
    }
    for name, options in cases.items():
        shared = (dim**-0.5, _TOP_K, _SINKS)
        with _poisoned():
            found = topk_attention(query, key, value, *shared, impl=setting.impl, **options)
        rounded = topk_attention(query, key, value, *shared, impl="reference", **options)
        exact = topk_attention(query.double(), key.double(), value.double(), *shared, impl="reference", **options)
        eager = _eager(query, key, value) if options.keys().isdisjoint(model) else rounded.output
        # Probabilities are rounded before they meet the values, which the reference, in float32, does not do.
        spare = 2.0 if eager is rounded.output else 1.0
        yield _difference(f"{name}, output", found.output, eager, exact.output, spare)
        yield _difference(f"{name}, weights", found.weights, rounded.weights, exact.weights, 4.0)
        clear = told_apart(exact.weights)
        yield Difference(f"{name}, keys", float((found.indices != exact.indices)[clear].sum()), 0.0)


def told_apart(weights: Tensor) -> Tensor:
    """Which of the descending weights stand further from their neighbours than rounding: their keys are certain."""
    gap = torch.nn.functional.pad(weights, (1, 1), value=2.0).diff(dim=-1).abs()
    return torch.minimum(gap[..., 1:], gap[..., :-1]) > 1e-5


def check_sparse_decode(setting: Setting) -> Iterator[Difference]:
    """Ragged lists over a view of larger storage, a list a kv head and a list a query head."""
    new, (query_heads, heads, dim) = _random(setting), setting.attention
    query = new(1, query_heads, 1, dim)
    keys, values = (new(1, heads, 2 * _KEYS, dim)[:, :, :_KEYS] for _ in range(2))
    order = torch.rand(1, query_heads, _KEYS, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)
    order[..., 200:260] = -1
    cases = {
        "with weights": (heads, {"top_k": _TOP_K, "first_candidate": _SINKS}),
        "output alone": (heads, {}),
        "a list a query head": (query_heads, {}),
        "soft cap and sink logits": (heads, {"softcap": 30.0, "sink_logits": new(query_heads)}),
    }
    for name, (selections, options) in cases.items():
        slots = order[:, :selections].to(setting.device)
        with _poisoned():
            found = sparse_decode(query, keys, values, slots, dim**-0.5, impl=setting.impl, **options)
        rounded = sparse_decode(query, keys, values, slots, dim**-0.5, impl="reference", **options)
        doubles = (x.double() for x in (query, keys, values))
        exact = sparse_decode(*doubles, slots, dim**-0.5, impl="reference", **options)
        yield _difference(f"{name}, output", found.output, rounded.output, exact.output, 2.0)
        if options.get("top_k"):
            yield _difference(f"{name}, weights", found.weights, rounded.weights, exact.weights, 4.0)
            clear = told_apart(exact.weights)
            yield Difference(f"{name}, slots", float((found.slots != exact.slots)[clear].sum()), 0.0)


def check_compact(setting: Setting) -> Iterator[Difference]:
    """Bit for bit what a gather gives, and nothing moved past the kept slots."""
    new, (_, heads, dim) = _random(setting), setting.attention
    keys, positions = new(2, heads, _KEYS, dim), torch.arange(_KEYS, device=setting.device).expand(2, heads, -1)
    order = torch.rand(2, heads, _KEYS, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)
    slots = order[..., :150].sort(dim=-1).values.to(setting.device)
    slots[0, 0, 140:] = -1
    index = slots.clamp(min=0)
    for name, tensor, fill in (("keys", keys, None), ("positions", positions.contiguous(), -1)):
        last = tensor.shape[3:]
        wanted = tensor.gather(2, index.view(*index.shape, *(1 for _ in last)).expand(*index.shape, *last))
        kept = (slots >= 0).view(*slots.shape, *(1 for _ in last))
        wanted = wanted.where(kept, tensor[:, :, :150] if fill is None else torch.full_like(wanted, fill))
        wanted = torch.cat((wanted, tensor[:, :, 150:]), dim=2)
        moved = tensor.clone()
        compact([moved], slots, [fill], impl=setting.impl)
        yield Difference(name, float((moved != wanted).sum()), 0.0)


def check_segment_quota(setting: Setting) -> Iterator[Difference]:
    """The slots of the torch path on a CPU, where running sums add in the order of slots."""
    for keep, interval in ((256, 512), (1000, 301)):
        workload = SegmentQuotaWorkload(batch=2, heads=setting.attention[1], keep=keep, interval=interval)
        inputs = workload.inputs("cpu")
        wanted = workload.run(inputs, "reference")
        with _poisoned():
            found = workload.run(_moved(inputs, setting.device), setting.impl)
        yield Difference(f"{keep + interval} slots", float((found.cpu() != wanted).sum()), 0.0)


def check_community_update(setting: Setting) -> Iterator[Difference]:
    """Labels and state after several tokens, against the torch path on a CPU."""
    workload = CommunityUpdateWorkload(2, setting.attention[1], 120, setting.attention[2], capacity=20)
    inputs = workload.inputs("cpu")
    here, there = inputs, _moved(inputs, setting.device)
    for step in range(6):
        for side in (here, there):
            side["slot"] = side["slot"] - 1 if step else side["slot"]
            side["communities"].labels[:, :, workload.length - 1 - step] = -1
        wanted = workload.run(here, "reference")
        with _poisoned():
            found = workload.run(there, setting.impl)
        yield Difference(f"label of token {step}", float((found.cpu() != wanted).sum()), 0.0)
    for field in dataclasses.fields(here["communities"]):
        wanted, found = (getattr(side["communities"], field.name).cpu().double() for side in (here, there))
        yield Difference(field.name, float((found - wanted).abs().max()), 1e-5 * float(wanted.abs().max()))


CHECKS: Mapping[str, Callable[[Setting], Iterator[Difference]]] = {
    "topk_attention": check_topk_attention,
    "sparse_decode": check_sparse_decode,
    "compact": check_compact,
    "segment_quota": check_segment_quota,
    "community_update": check_community_update,
}


def _difference(case: str, found: Tensor, rounded: Tensor, exact: Tensor, magnitude: float) -> Difference:
    """At most twice the error of the reference in the same dtype, plus one rounding of the largest number."""
    error = (found.double() - exact).abs().max().item()
    rounding = torch.finfo(found.dtype).eps * exact.abs().max().item() * magnitude
    return Difference(case, error, 2 * (rounded.double() - exact).abs().max().item() + rounding)


def _eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as a model without fused kernels computes it in its own dtype."""
    group, (num_queries, num_keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    late = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).triu(num_keys - num_queries + 1)
    logits = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(late, -torch.inf)
    return logits.float().softmax(-1).to(query.dtype) @ value


def _random(setting: Setting) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(setting.dtype).to(setting.device)


def _moved(value: Any, device: str) -> Any:
    """A copy on `device` of every tensor inside."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    fields = {field.name: _moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


@contextmanager
def _poisoned() -> Iterator[None]:
    """New buffers are full of NaN (or the largest integer), so that what a kernel fails to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
