"""The ablations of the public AMS code, as the experiments name them, against the public algorithm written with loops.

`public_event` follows the order of its steps (methods of arXiv 2605.23200 as EIT-NLP/AdaptiveMassSegment does them at 7eb32cd):
credit, mass averaged over the batch, segments, quotas rounded half to even and dealt one by one, candidates inside segments,
protected slots put in afterwards by the global score.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from kvstitch.allocators import FixedSegments, SegmentQuota

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def of_experiment(name, made, base, **changes):
    """The allocator of an experiment: its overrides on the file that it names."""
    options = OmegaConf.merge(
        OmegaConf.load(CONFIGS / "allocator" / f"{base}.yaml"),
        OmegaConf.load(CONFIGS / "experiment" / "ams_ablation" / f"{name}.yaml").allocator,
    )
    del options["_target_"]
    return made(**OmegaConf.to_container(options) | changes)


def fixed_segments(mass, allocator):
    starts = range(0, len(mass), allocator.segment_tokens)
    return [list(range(start, min(start + allocator.segment_tokens, len(mass)))) for start in starts]


def mass_segments(mass, allocator):
    """Cuts where the running sum reaches a multiple of `segment_mass`; the slot that reaches it starts the next segment."""
    slots, cuts, multiple = len(mass), {0}, 1
    while multiple * allocator.segment_mass < 1:
        running = 0.0
        for slot, value in enumerate(mass):
            running += value
            if running >= multiple * allocator.segment_mass:
                cuts.add(min(max(slot, 1), slots - 1))
                break
        multiple += 1
    parts, edges = [], [*sorted(cuts), slots]
    for start, end in zip(edges, edges[1:]):
        while end - start > allocator.max_segment_tokens:
            parts.append(range(start, start + allocator.max_segment_tokens))
            start += allocator.max_segment_tokens
        parts.append(range(start, end))
    merged = []
    for part in map(list, parts):
        if merged and len(merged[-1]) < allocator.min_segment_tokens:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def public_quotas(lengths, masses, keep, floor):
    base = [min(floor, length) for length in lengths]
    quotas = list(base)
    if sum(base) >= keep:
        while sum(quotas) > keep:
            for i, quota in enumerate(quotas):
                if quota > 1 and sum(quotas) > keep:
                    quotas[i] -= 1
        return quotas
    room = keep - sum(base)
    quotas = [
        min(length, b + round(room * mass / (sum(masses) + 1e-12))) for length, b, mass in zip(lengths, base, masses)
    ]
    while sum(quotas) > keep:
        for i, least in enumerate(base):
            if quotas[i] > least and sum(quotas) > keep:
                quotas[i] -= 1
    while sum(quotas) < keep:
        for i, length in enumerate(lengths):
            if quotas[i] < length and sum(quotas) < keep:
                quotas[i] += 1
    return quotas


def public_event(loops, allocator, segments_of, scores, usage, credit, keep):
    """Per row: kept slots, their credit and the quotas of one head; `scores`, `usage` and `credit` are lists of rows."""
    rows, slots = range(len(scores)), len(scores[0])
    mixed = [
        loops.mass(usage[row], credit[row], allocator.credit_decay, allocator.credit_mix, allocator.credit_scale)
        for row in rows
    ]
    mean = [sum(mixed[row][0][slot] for row in rows) / len(scores) for slot in range(slots)]
    mass = [(m + 1e-12) / sum(x + 1e-12 for x in mean) for m in mean]
    segments = segments_of(mass, allocator)
    masses = [sum(mass[slot] for slot in segment) for segment in segments]
    quotas = public_quotas([len(segment) for segment in segments], masses, keep, allocator.min_keep_tokens)
    recent = min(allocator.num_recent, keep)
    must = {*range(min(allocator.num_sinks, keep - recent)), *range(slots - recent, slots)}
    out = []
    for row in rows:
        candidates = set()
        for segment, quota in zip(segments, quotas):
            candidates |= set(loops.best_first(scores[row], segment)[:quota])
        best = loops.best_first(scores[row], sorted(candidates - must))
        kept = sorted(must | set(best[: keep - len(must)]))
        out.append((kept, [mixed[row][1][slot] for slot in kept], quotas))
    return out


def assert_events_equal(loops, allocator, segments_of, batch, keep, lengths, seed):
    """Events in a row, each with new slots behind those that were kept; evidence is spiky and ever stronger."""
    draw = torch.Generator().manual_seed(seed)
    heads, credit = 2, None
    history = [[[] for _ in range(heads)] for _ in range(batch)]
    for event, slots in enumerate(lengths):
        scores = torch.randn(batch, heads, slots, generator=draw)
        usage = torch.rand(batch, heads, slots, generator=draw) ** 6 * 3**event
        result = allocator.select(scores, usage, keep, credit)
        for head in range(heads):
            lists = [x[:, head].tolist() for x in (scores, usage)]
            rows = public_event(loops, allocator, segments_of, *lists, [row[head] for row in history], keep)
            for row, (kept, left, quotas) in enumerate(rows):
                assert result.slots[row, head].tolist() == kept
                assert [quota for quota in result.quotas[row, head].tolist() if quota >= 0] == quotas
                torch.testing.assert_close(result.credit[row, head], torch.tensor(left), rtol=1e-4, atol=1e-7)
                history[row][head] = left
        credit = result.credit


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("segment_tokens, keep, lengths", [
    (128, 256, (700, 768, 768)),
    (128, 37, (549, 549)),  # protected slots leave one to choose, and five floors of 8 cost more
    (16, 96, (150, 224, 193)),
    (16, 60, (160, 124)),
])  # fmt: skip
def test_public_fixed_segments(loops, batch, segment_tokens, keep, lengths):
    allocator = of_experiment("public_fixed_segments", FixedSegments, "fixed_segments")
    assert (allocator.segment_tokens, allocator.quota, allocator.must_keep) == (128, "reference", "after")
    allocator = of_experiment("public_fixed_segments", FixedSegments, "fixed_segments", segment_tokens=segment_tokens)
    assert_events_equal(loops, allocator, fixed_segments, batch, keep, lengths, seed=keep)


@pytest.mark.parametrize("keep, lengths", [(256, (700, 768, 768)), (90, (300, 346, 602))])
@pytest.mark.parametrize("segment_mass, shortest, longest", [(0.02, 32, 1024), (0.1, 8, 40)])
def test_public_no_mass(loops, segment_mass, shortest, longest, keep, lengths):
    """Batches of one: the public code averages rows before they are normalised, which gives rows of a batch other weights."""
    allocator = of_experiment(
        "public_no_mass",
        SegmentQuota,
        "segment_quota_reference",
        segment_mass=segment_mass,
        min_segment_tokens=shortest,
        max_segment_tokens=longest,
    )
    assert allocator.credit_scale == "usage"
    assert_events_equal(loops, allocator, mass_segments, 1, keep, lengths, seed=keep)


@pytest.mark.parametrize("mix", [0.9, 0.2])
def test_credit_in_usage_with_our_own_rules(loops, mix):
    """The switch `ams_switches/credit_scale_usage`: segments and quotas as recommended, evidence added up as measured."""
    allocator = SegmentQuota(
        min_segment_tokens=4, max_segment_tokens=24, num_sinks=2, num_recent=5, credit_scale="usage", credit_mix=mix
    )
    draw, credit = torch.Generator().manual_seed(3), None
    for event, slots in enumerate((97, 75, 75)):
        scores = torch.randn(2, 3, slots, generator=draw)
        usage = torch.rand(2, 3, slots, generator=draw) ** 6 * 4**event
        result = allocator.select(scores, usage, 34, credit)
        for row in range(2):
            for head in range(3):
                old = [] if credit is None else credit[row, head].tolist()
                arrived = scores[row, head].tolist(), usage[row, head].tolist()
                kept, left, edges, quotas = loops.event(*arrived, old, 34, allocator)
                assert [edge for edge in result.boundaries[row, head].tolist() if edge >= 0] == edges
                assert [quota for quota in result.quotas[row, head].tolist() if quota >= 0] == quotas
                assert result.slots[row, head].tolist() == kept
                torch.testing.assert_close(result.credit[row, head], torch.tensor(left))
        credit = result.credit


@pytest.mark.parametrize("scale, first_share", [("usage", 0.235 / 0.4), ("mass", 0.25 / 2 + 0.115 / 0.19 / 2)])
def test_credit_in_usage_by_hand(scale, first_share):
    """Segments of two slots; evidence 4 and 0, then 0.1 and 0.3. A tenth of it enters credit, nine tenths of that stay.

    As measured: credit is 0.4 and 0, then 0.36 + 0.01 and 0.03; half evidence, half credit: 0.235 and 0.165 of 0.4. As shares:
    evidence 1 and 0, then 1/4 and 3/4; credit 0.1 and 0, then 0.09 + 0.025 and 0.075, of 0.19.
    """
    allocator = FixedSegments(
        segment_tokens=2, num_sinks=0, num_recent=0, credit_decay=0.9, credit_mix=0.5, credit_scale=scale
    )
    first = allocator.select(torch.tensor([[[2.0, 1, -1, -1]]]), torch.tensor([[[2.0, 2, 0, 0]]]), 3)
    assert first.slots[0, 0, :2].tolist() == [0, 1]
    old = first.credit[..., :2]
    torch.testing.assert_close(old, torch.full((1, 1, 2), {"usage": 0.2, "mass": 0.05}[scale]))
    second = allocator.select(torch.zeros(1, 1, 4), torch.tensor([[[0.05, 0.05, 0.15, 0.15]]]), 3, old)
    torch.testing.assert_close(second.masses, torch.tensor([[[first_share, 1 - first_share]]]))
