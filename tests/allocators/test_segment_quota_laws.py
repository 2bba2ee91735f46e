"""What holds for every input of SegmentQuota and FixedSegments: random ones, degenerate ones, holes, odd sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstitch.allocators import FixedSegments, SegmentQuota
from kvstitch.kernels.segment_quota.quotas import one_at_a_time, public_quotas, water_fill

LIMITS = settings(max_examples=50, deadline=None, derandomize=True)


@st.composite
def allocators(draw):
    """Any options that may be combined."""
    shared = {
        "min_keep_tokens": draw(st.integers(0, 6)),
        "num_sinks": draw(st.integers(0, 5)),
        "num_recent": draw(st.integers(0, 9)),
        "must_keep": draw(st.sampled_from(["first_counted", "first_separate", "after"])),
        "must_priority": draw(st.sampled_from(["sink", "suffix"])),
        "credit_init": draw(st.sampled_from(["zero", "mass"])),
        "credit_scale": draw(st.sampled_from(["mass", "usage"])),
        "mass_dtype": draw(st.sampled_from(["float64", "float32"])),
    }
    if draw(st.booleans()):
        quota = draw(st.sampled_from(["mass", "length", "reference"]))
        return FixedSegments(segment_tokens=draw(st.integers(1, 40)), quota=quota, **shared)
    shortest = draw(st.integers(1, 12))
    return SegmentQuota(
        segment_mass=draw(st.sampled_from([0.02, 0.1, 0.23, 0.5, 1.0])),
        min_segment_tokens=shortest,
        max_segment_tokens=2 * shortest + draw(st.integers(0, 40)),
        boundary=draw(st.sampled_from(["include", "exclude"])),
        split=draw(st.sampled_from(["even", "chunk"])),
        merge=draw(st.sampled_from(["forward_then_tail", "forward"])),
        quota=draw(st.sampled_from(["waterfill", "length", "reference"])),
        **shared,
    )


@st.composite
def layers(draw, batch=2, heads=2, holes=False):
    """Scores, usage, credit (or None), budgets and valid slots (or None)."""
    slots = draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (batch, heads, slots)
    kind = draw(st.sampled_from(["even", "spiky", "zero", "nan", "some nan", "negative", "ties"]))
    usage = torch.rand(shape, generator=generator)
    usage = {
        "even": usage,
        "spiky": usage**15,
        "zero": usage * 0,
        "nan": usage * float("nan"),
        "some nan": torch.where(usage < 0.2, float("nan"), usage),
        "negative": usage - 0.5,
        "ties": torch.ones(shape),
    }[kind]
    scores = torch.randn(shape, generator=generator)
    if draw(st.booleans()):
        scores = torch.where(torch.rand(shape, generator=generator) < 0.3, float("nan"), scores.round())
    known = draw(st.integers(0, slots))
    credit = torch.rand(batch, heads, known, generator=generator) if known else None
    keep = torch.tensor([draw(st.integers(1, slots + 3)) for _ in range(batch)])
    valid = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0])) if holes else None
    return scores, usage, keep, credit, valid


def check_selection(allocator, result, scores, keep, valid):
    batch, heads, slots = scores.shape
    for row in range(batch):
        for head in range(heads):
            present = torch.arange(slots) if valid is None else torch.where(valid[row, head])[0]
            budget = min(int(keep[row]), len(present))
            kept = result.slots[row, head].tolist()
            # exact total, ascending, unique, empty slots never
            assert kept[budget:] == [-1] * (len(kept) - budget)
            kept = kept[:budget]
            assert kept == sorted(set(kept)) and set(kept) <= set(present.tolist())
            check_protected(allocator, kept, present.tolist(), budget)
            check_quotas(allocator, result, row, head, len(present), budget)
            assert torch.isfinite(result.credit[row, head]).all()


def check_protected(allocator, kept, present, budget):
    if allocator.must_priority == "sink":
        sinks = min(allocator.num_sinks, budget)
        recent = min(allocator.num_recent, budget - sinks)
    else:
        recent = min(allocator.num_recent, budget)
        sinks = min(allocator.num_sinks, budget - recent)
    assert set(present[:sinks]) <= set(kept) and set(present[len(present) - recent :]) <= set(kept)


def check_quotas(allocator, result, row, head, count, budget):
    edges = [edge for edge in result.boundaries[row, head].tolist() if edge >= 0]
    quotas = [quota for quota in result.quotas[row, head].tolist() if quota >= 0]
    lengths = [b - a for a, b in zip(edges, edges[1:])]
    assert edges[0] == 0 and sum(lengths) == count and all(length > 0 for length in lengths)
    assert len(quotas) == len(lengths) and sum(quotas) == budget
    assert all(0 <= quota <= length for quota, length in zip(quotas, lengths))
    missed = sum(quota < min(allocator.min_keep_tokens, length) for quota, length in zip(quotas, lengths))
    assert result.floors_missed[row, head] == missed
    floors = sum(min(allocator.min_keep_tokens, length) for length in lengths)
    if floors + allocator.num_sinks + allocator.num_recent <= budget:
        assert missed == 0
    if isinstance(allocator, SegmentQuota) and allocator.merge == "forward_then_tail" and count:
        assert min(lengths) >= min(allocator.min_segment_tokens, count)
        if allocator.split == "even" or allocator.segment_mass < 1:
            assert max(lengths) <= allocator.max_segment_tokens


@LIMITS
@given(allocators(), layers())
def test_every_selection_is_lawful(allocator, layer):
    scores, usage, keep, credit, valid = layer
    check_selection(allocator, allocator.select(scores, usage, keep, credit), scores, keep, None)


@LIMITS
@given(allocators(), layers(holes=True))
def test_holes_change_nothing(allocator, layer):
    """Every head gets, bit for bit in float64, what its valid slots alone get: heads and rows are independent, too."""
    scores, usage, keep, credit, valid = layer
    result = allocator.select(scores, usage, keep, credit, valid)
    check_selection(allocator, result, scores, keep, valid)
    for row, head in ((row, head) for row in range(2) for head in range(2)):
        present = torch.where(valid[row, head])[0]
        if len(present) == 0 or allocator.mass_dtype == "float32":
            continue
        own = [tensor[row, head, present][None, None] for tensor in (scores, usage)]
        old = None if credit is None else credit[row, head, present[present < credit.shape[-1]]][None, None]
        alone = allocator.select(*own, int(keep[row]), old)
        budget = min(int(keep[row]), len(present))
        assert result.slots[row, head, :budget].tolist() == present[alone.slots[0, 0]].tolist()
        assert torch.equal(result.credit[row, head, :budget], alone.credit[0, 0])
        used = alone.boundaries[0, 0] >= 0
        assert torch.equal(result.boundaries[row, head, : used.sum()], alone.boundaries[0, 0][used])


@LIMITS
@given(allocators(), layers(heads=3))
def test_heads_may_be_permuted(allocator, layer):
    scores, usage, keep, credit, valid = layer
    order = [2, 0, 1]
    turned = None if credit is None else credit[:, order]
    result = allocator.select(scores, usage, keep, credit)
    other = allocator.select(scores[:, order], usage[:, order], keep, turned)
    assert torch.equal(result.slots[:, order], other.slots) and torch.equal(result.credit[:, order], other.credit)


@pytest.mark.parametrize("allocator", [SegmentQuota(), SegmentQuota.paper(), SegmentQuota.reference(), FixedSegments()])
@pytest.mark.parametrize("slots", [1, 2, 37, 301])
def test_a_budget_of_everything_keeps_everything(allocator, slots):
    scores = torch.randn(1, 2, slots, generator=torch.Generator().manual_seed(slots))
    for keep in (slots, slots + 5):
        result = allocator.select(scores, scores.abs(), keep)
        assert torch.equal(result.slots, torch.arange(slots).expand(1, 2, -1))


@pytest.mark.parametrize("quota", ["waterfill", "reference"])
def test_nan_scores_lose_inside_their_segment(quota):
    allocator = SegmentQuota(num_sinks=0, num_recent=0, quota=quota, must_keep="after")
    scores = torch.where(torch.arange(200) % 2 == 0, float("nan"), -1e30)[None, None]
    result = allocator.select(scores, torch.ones_like(scores), 90)
    assert not torch.isnan(scores.gather(-1, result.slots)).any()


# -- the rules alone ----------------------------------------------------------------------------------------------


@st.composite
def segments(draw):
    number = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(0, 30), min_size=number, max_size=number))
    lengths[0] += 1
    must = [draw(st.integers(0, min(length, 4))) for length in lengths]
    keep = draw(st.integers(max(1, sum(must)), sum(lengths)))
    kind = draw(st.sampled_from(["any", "zero", "equal"]))
    weights = draw(st.lists(st.floats(0, 1), min_size=number, max_size=number))
    weights = {"any": weights, "zero": [0.0] * number, "equal": [0.25] * number}[kind]
    return lengths, weights, must, keep, draw(st.integers(0, 8))


def as_rows(*lists):
    return [torch.tensor(values, dtype=torch.float64)[None, None] for values in lists]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=segments())
def test_water_filling_is_exact_and_bounded(case):
    lengths, weights, must, keep, floor = case
    length, weight, protected, budget = as_rows(lengths, weights, must, [keep])
    quotas = water_fill(length, weight, protected, budget, floor)[0, 0].tolist()
    assert sum(quotas) == keep
    assert all(m <= q <= n for m, q, n in zip(must, quotas, lengths))
    base = [min(floor, n) for n in lengths]
    if sum(max(b, m) for b, m in zip(base, must)) <= keep:
        assert all(q >= b for q, b in zip(quotas, base))
        assert water_fill(length, weight, protected, budget, floor, may_fail=False)[0, 0].tolist() == quotas
    else:
        assert all(q <= max(b, m) for q, b, m in zip(quotas, base, must))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=segments())
def test_public_rounding_is_exact_too(case):
    lengths, weights, must, keep, floor = case
    length, weight, protected, budget = as_rows(lengths, weights, must, [keep])
    quotas = public_quotas(length, weight, protected, budget, floor)[0, 0].tolist()
    assert sum(quotas) == keep
    assert all(m <= q <= n for m, q, n in zip(must, quotas, lengths))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.floats(0, 1))
def test_dealing_one_at_a_time(capacity, share):
    units = int(sum(capacity) * share)
    expected, left, turn = [0] * len(capacity), units, 0
    while left:
        if expected[turn] < capacity[turn]:
            expected[turn] += 1
            left -= 1
        turn = (turn + 1) % len(capacity)
    caps, total = as_rows(capacity, [units])
    assert one_at_a_time(caps, total)[0, 0].tolist() == expected
