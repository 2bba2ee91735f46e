"""Figures of the public AMS code, replayed exactly, and the hand-computed cases of both rule sets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstitch.allocators import FixedSegments, SegmentQuota
from kvstitch.kernels.segment_quota.quotas import public_quotas, water_fill
from kvstitch.kernels.segment_quota.segments import mass_edges

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "ams_reference.json").read_text())
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


@pytest.fixture(scope="module")
def arrays():
    return np.load(GOLDEN / "ams_reference.npz")


def segments_of(boundaries):
    edges = [edge for edge in boundaries.tolist() if edge >= 0]
    return [list(pair) for pair in zip(edges, edges[1:])]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['case']}-{case['kind']}-{case['keep']}" for case in CASES])
def test_public_code_is_replayed_exactly(case, arrays):
    allocator = SegmentQuota.reference(**{NAMES[name]: value for name, value in case["params"].items()})
    credit = None
    for number, event in enumerate(case["events"]):
        usage, scores, indices, wanted = (
            torch.from_numpy(arrays[f"c{case['case']}_e{number}_{name}"])
            for name in ("usage", "scores", "indices", "credit")
        )
        result = allocator.select(scores, usage, case["keep"], credit)
        for head, segments in enumerate(event["segments"]):
            assert segments_of(result.boundaries[0, head]) == segments
            assert [quota for quota in result.quotas[0, head].tolist() if quota >= 0] == event["quotas"][head]
        assert torch.equal(result.slots, indices)
        assert torch.equal(result.credit, wanted)
        credit = result.credit


def test_there_are_24_cases_of_two_events():
    assert len(CASES) == 24 and all(len(case["events"]) == 2 for case in CASES)


UNIFORM_16, UNIFORM_100 = [1 / 16] * 16, [1 / 100] * 100
SPIKE = [0.02] * 7 + [0.70] + [0.02] * 8


@pytest.mark.parametrize(
    "mass, segment_mass, shortest, longest, public, recommended",
    [
        (UNIFORM_16, 0.25, 1, 100, [0, 3, 7, 11, 16], [0, 4, 8, 12, 16]),
        (SPIKE, 0.25, 1, 100, [0, 7, 16], [0, 8, 16]),
        (UNIFORM_100, 0.1, 16, 100, [0, 20, 40, 60, 80, 100], [0, 20, 40, 60, 80, 100]),
        (UNIFORM_100, 0.3, 1, 100, [0, 30, 60, 89, 100], [0, 30, 60, 90, 100]),
        (UNIFORM_100, 1.0, 1, 30, [0, 100], [0, 25, 50, 75, 100]),
    ],
)
def test_cuts_by_hand(mass, segment_mass, shortest, longest, public, recommended):
    lengths = {"segment_mass": segment_mass, "min_segment_tokens": shortest, "max_segment_tokens": longest}
    for allocator, expected in (
        (SegmentQuota.reference(**lengths), public),
        (SegmentQuota.recommended(**lengths), recommended),
    ):
        prefix = torch.tensor(mass, dtype=torch.float32)[None, None].cumsum(dim=-1, dtype=torch.float64)
        edges = mass_edges(prefix, None, allocator._rules)[0, 0].unique().tolist()
        assert edges == expected


@pytest.mark.parametrize(
    "lengths, masses, keep, floor, public, recommended",
    [
        ([4, 4, 4, 4], [0.25] * 4, 8, 1, [2, 2, 2, 2], [2, 2, 2, 2]),
        ([10, 10, 10], [0.34, 0.33, 0.33], 5, 1, [1, 2, 2], [2, 2, 1]),
        ([3, 20, 20], [0.8, 0.1, 0.1], 12, 1, [3, 5, 4], [3, 5, 4]),
        ([8, 8, 8, 8], [0.4, 0.3, 0.2, 0.1], 10, 4, [2, 2, 3, 3], [3, 3, 2, 2]),
        ([10, 10, 10], [0.5, 0.3, 0.2], 9, 1, [4, 3, 2], [4, 3, 2]),
        ([10, 10, 10], [0.5, 0.3, 0.2], 8, 1, [4, 2, 2], [4, 2, 2]),
    ],
)
def test_quotas_by_hand(lengths, masses, keep, floor, public, recommended):
    length, mass, budget = (torch.tensor(x, dtype=torch.float64)[None, None] for x in (lengths, masses, [keep]))
    none = torch.zeros_like(length)
    assert public_quotas(length, mass, none, budget, floor)[0, 0].tolist() == public
    assert water_fill(length, mass, none, budget, floor)[0, 0].tolist() == recommended


def test_more_segments_than_budget_ends():
    """The public code never returns here."""
    length = torch.full((1, 1, 40), 3.0, dtype=torch.float64)
    budget = torch.full((1, 1, 1), 32.0, dtype=torch.float64)
    for rule in (public_quotas, water_fill):
        quotas = rule(length, length, torch.zeros_like(length), budget, 1)
        assert quotas.sum() == 32 and quotas.min() >= 0


# Four segments of four slots, 8 kept: the second one has the lowest scores throughout.
SIXTEEN = [9.0, 8, 7, 6, 0.4, 0.3, 0.2, 0.1, 0.8, 0.7, 0.6, 0.5, 5, 4, 3, 2]


@pytest.mark.parametrize(
    "sinks, recent, after, counted",
    [
        (0, 0, [2, 2, 2, 2], [2, 2, 2, 2]),
        (1, 1, [2, 1, 2, 3], [2, 2, 2, 2]),
        (2, 2, [2, 0, 2, 4], [2, 2, 2, 2]),
        (0, 4, [2, 0, 2, 4], [2, 1, 1, 4]),
    ],
)
def test_protected_slots_empty_a_segment_only_if_counted_after(sinks, recent, after, counted):
    scores = torch.tensor(SIXTEEN)[None, None]
    fixed = {"segment_tokens": 4, "num_sinks": sinks, "num_recent": recent}
    for options, expected in (({"must_keep": "after", "must_priority": "suffix"}, after), ({}, counted)):
        result = FixedSegments(**fixed, **options).select(scores, torch.ones_like(scores), 8)
        kept = torch.bincount(result.slots[0, 0] // 4, minlength=4).tolist()
        assert kept == expected
