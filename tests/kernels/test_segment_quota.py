"""The kernels of mass segments against the torch path, which tests/allocators hold against loops and golden figures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstitch.allocators import FixedSegments, SegmentQuota
from kvstitch.kernels.segment_quota.api import segment_plan, segment_select

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = {
    "window_size": "window_tokens",
    "segment_mass": "segment_mass",
    "min_seg_len": "min_segment_tokens",
    "max_seg_len": "max_segment_tokens",
    "min_keep_per_segment": "min_keep_tokens",
    "n_sink": "num_sinks",
    "always_keep_last": "num_recent",
    "use_credit": "credit",
    "credit_decay": "credit_decay",
    "mix_beta": "credit_mix",
}
SMALL = dict(num_sinks=2, num_recent=5)
CUTS = dict(min_segment_tokens=4, max_segment_tokens=11)
# Each switch takes each of its values at least once; T is larger than a power of two, or one.
CASES = {
    "recommended": (SegmentQuota(**SMALL, **CUTS), dict(slots=70, keep=30)),
    "paper, no floor": (SegmentQuota.paper(**SMALL, **CUTS, min_keep_tokens=0), dict(slots=65, keep=20)),
    "reference": (SegmentQuota.reference(**SMALL, **CUTS), dict(slots=67, keep=33)),
    "floors too dear": (SegmentQuota(**SMALL, **CUTS, min_keep_tokens=6), dict(slots=70, keep=12)),
    "protected apart": (SegmentQuota(**SMALL, **CUTS, must_keep="first_separate"), dict(slots=61, keep=25)),
    "protected after": (SegmentQuota(**SMALL, **CUTS, must_keep="after"), dict(slots=61, keep=25)),
    "suffix first": (SegmentQuota(num_sinks=4, num_recent=9, **CUTS, must_priority="suffix"), dict(slots=40, keep=10)),
    "public rounding of waterfill cuts": (
        SegmentQuota(**SMALL, **CUTS, quota="reference", min_keep_tokens=2),
        dict(slots=70, keep=31),
    ),
    "chunks, forward": (
        SegmentQuota(**SMALL, min_segment_tokens=5, max_segment_tokens=9, split="chunk", merge="forward"),
        dict(slots=70, keep=31),
    ),
    "one segment": (SegmentQuota(**SMALL, **CUTS, segment_mass=1.0, split="chunk"), dict(slots=50, keep=17)),
    "by length": (SegmentQuota(**SMALL, **CUTS, quota="length", segment_mass=0.23), dict(slots=50, keep=17)),
    "no credit": (SegmentQuota(**SMALL, **CUTS, credit=False), dict(slots=50, keep=17, credit=0)),
    "credit of new slots": (SegmentQuota(**SMALL, **CUTS, credit_init="mass"), dict(slots=50, keep=17, credit=20)),
    "credit in usage": (SegmentQuota(**SMALL, **CUTS, credit_scale="usage"), dict(slots=50, keep=17, credit=50)),
    "fixed": (FixedSegments(**SMALL, segment_tokens=7), dict(slots=50, keep=17)),
    "fixed by mass": (FixedSegments(**SMALL, segment_tokens=64, quota="mass"), dict(slots=50, keep=17)),
    "one slot": (SegmentQuota(**SMALL, **CUTS), dict(slots=1, keep=1)),
    "nothing to evict": (SegmentQuota(**SMALL, **CUTS), dict(slots=20, keep=25)),
    "empty slots": (SegmentQuota(**SMALL, **CUTS), dict(slots=70, keep=20, filled=0.6)),
    "empty slots, reference": (SegmentQuota.reference(**SMALL, **CUTS), dict(slots=70, keep=20, filled=0.6)),
    "an empty long head, cuts as the public code": (
        SegmentQuota.reference(**SMALL, **CUTS, must_keep="first_separate"),
        dict(slots=30, keep=20, filled=0.0),
    ),
    "an empty head": (SegmentQuota(**SMALL, **CUTS), dict(slots=30, keep=20, filled=0.0)),
    "even evidence": (SegmentQuota(**SMALL, **CUTS), dict(slots=60, keep=20, kind="even", credit=0)),
    "no evidence": (SegmentQuota(**SMALL, **CUTS), dict(slots=60, keep=20, kind="none")),
    "evidence that is not a number": (SegmentQuota(**SMALL, **CUTS), dict(slots=60, keep=20, kind="nan")),
}


def event(slots, keep, credit=35, filled=None, kind="spiky", seed=0):
    """Scores with ties, NaN and infinities, evidence, budgets, credit and valid slots."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(1, 2, slots, generator=generator)
    usage = {"spiky": uniform**9, "even": uniform * 0 + 1, "none": uniform * 0, "nan": uniform - 0.5}[kind]
    if kind == "nan":
        usage[uniform < 0.2] = float("nan")
        usage[uniform > 0.9] = float("inf")
    scores = (torch.randn(1, 2, slots, generator=generator) * 4).round() / 2
    scores[..., ::9], scores[..., 4::31], scores[..., 5::31] = float("nan"), float("inf"), -float("inf")
    known = min(credit, slots)
    history = torch.rand(1, 2, known, generator=generator) if known else None
    valid = None if filled is None else torch.rand(1, 2, slots, generator=generator) < filled
    return scores, usage, torch.tensor([keep]), history, valid


def selection_of(plan, rules, width):
    options = dict(must_keep=rules.must_keep, width=width)
    return (plan.slot_edges, plan.quotas, plan.num_first, plan.first_recent), options


@pytest.mark.parametrize("name", CASES)
def test_reference_selection_equals_the_shared_selector(name):
    allocator, case = CASES[name]
    scores, usage, keep, credit, valid = event(**case)
    chosen = allocator.select(scores, usage, keep, credit, valid)
    plan = segment_plan(usage, credit, keep, int(keep), valid, allocator._rules)
    tensors, options = selection_of(plan, allocator._rules, chosen.slots.shape[-1])
    assert torch.equal(segment_select(scores, *tensors, valid, **options), chosen.slots)


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_the_torch_path(name, run_triton, assert_same_plan):
    allocator, case = CASES[name]
    scores, usage, keep, credit, valid = event(**case)
    expected = segment_plan(usage, credit, keep, int(keep), valid, allocator._rules)
    assert_same_plan(run_triton(segment_plan, usage, credit, keep, int(keep), valid, allocator._rules).result, expected)
    tensors, options = selection_of(expected, allocator._rules, min(case["keep"], case["slots"]))
    found = run_triton(segment_select, scores, *tensors, valid, **options).result
    assert torch.equal(found, segment_select(scores, *tensors, valid, **options))


@pytest.mark.parametrize("event", [0, 1])
@pytest.mark.parametrize("number", range(24))
def test_triton_replays_the_public_code(number, event, run_triton):
    """Both events of every golden case, the second with the credit of the first."""
    case = json.loads((GOLDEN / "ams_reference.json").read_text())[number]
    arrays = np.load(GOLDEN / "ams_reference.npz")
    read = lambda name, event=event: torch.from_numpy(arrays[f"c{case['case']}_e{event}_{name}"])
    usage, credit = read("usage"), read("credit", 0) if event else None
    rules = SegmentQuota.reference(**{NAMES[name]: value for name, value in case["params"].items()})._rules
    keep = torch.full((usage.shape[0],), case["keep"])
    plan = run_triton(segment_plan, usage, credit, keep, case["keep"], None, rules).result
    for head, quotas in enumerate(case["events"][event]["quotas"]):
        assert plan.quotas[0, head, : len(quotas)].tolist() == quotas
    tensors, options = selection_of(plan, rules, case["keep"])
    assert torch.equal(run_triton(segment_select, read("scores"), *tensors, None, **options).result, read("indices"))


def test_heads_longer_than_a_tile(run_triton, assert_same_plan):
    """Several tiles in both kernels; the running sums of tiles are added in another order than the torch path's."""
    generator = torch.Generator().manual_seed(3)
    usage, scores = torch.rand(1, 1, 4500, generator=generator) ** 4, torch.randn(1, 1, 4500, generator=generator)
    rules, keep = SegmentQuota()._rules, torch.tensor([700])
    valid = torch.rand(1, 1, 4500, generator=generator) < 0.9
    expected = segment_plan(usage, None, keep, 700, valid, rules)
    found = run_triton(segment_plan, usage, None, keep, 700, valid, rules).result
    assert_same_plan(found, expected)
    tensors, options = selection_of(expected, rules, 700)
    selected = run_triton(segment_select, scores, *tensors, valid, **options).result
    assert torch.equal(selected, segment_select(scores, *tensors, valid, **options))
