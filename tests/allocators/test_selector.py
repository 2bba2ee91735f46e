"""The one top-k: hand-sized cases, and the definition by loops over regions that are not contiguous."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstitch.allocators import Partition, protected, select, slots_of

NAN = float("nan")
INF = float("inf")


def kept(scores, quotas, partition=None, must=None, valid=None):
    mask = select(torch.tensor(scores)[None, None], torch.tensor(quotas)[None, None], partition, must, valid)
    return torch.where(mask[0, 0])[0].tolist()


def test_one_region_takes_the_best():
    assert kept([0.1, 0.9, -0.5, 0.7], [2]) == [1, 3]


def test_equal_scores_go_to_the_lower_slot():
    assert kept([0.0, 1.0, 1.0, 1.0, 1.0], [3]) == [1, 2, 3]
    assert kept([0.0, -0.0, 0.0, -0.0], [3]) == [0, 1, 2]


def test_nan_never_wins():
    assert kept([NAN, -INF, NAN, -3.0], [2]) == [1, 3]
    assert kept([NAN, 1.0, NAN], [2]) == [0, 1]


@pytest.mark.parametrize("peak", [INF, 3.4e38])
def test_protected_slots_beat_every_score(peak):
    must = torch.tensor([False, False, False, True])
    assert kept([peak, peak, 0.0, NAN], [2], must=must) == [0, 3]


def test_empty_slots_are_never_kept():
    valid = torch.tensor([[[False, True, True, False]]])
    assert kept([INF, NAN, -1.0, 9.0], [2], valid=valid) == [1, 2]
    everything = torch.ones(4, dtype=torch.bool)
    assert kept([INF, NAN, -1.0, 9.0], [2], must=everything, valid=valid) == [1, 2]


def test_regions_need_not_be_contiguous():
    partition = Partition.of_ids(torch.tensor([[[0, 1, 0, 1, 2, 0]]]), 3)
    assert kept([1.0, 9.0, 3.0, 8.0, -5.0, 2.0], [2, 1, 1], partition) == [1, 2, 4, 5]


def test_contiguous_regions_by_edges():
    edges = torch.tensor([[[0, 3, 3, 5]], [[0, 1, 4, 5]]])
    partition = Partition.of_edges(edges, 5)
    assert partition.ids[:, 0].tolist() == [[0, 0, 0, 2, 2], [0, 1, 1, 1, 2]]
    by_ids = Partition.of_ids(partition.ids, 3)
    assert torch.equal(by_ids.ids, partition.ids) and torch.equal(by_ids.starts, partition.starts)


def test_slots_are_ascending_and_padded():
    mask = torch.tensor([[[True, False, True, True], [False, False, False, True]]])
    assert slots_of(mask, 3)[0].tolist() == [[0, 2, 3], [3, -1, -1]]


def test_protected_counts_valid_slots_only():
    valid = torch.tensor([[[False, True, True, False, True, True, False]]])
    one = torch.tensor([[[1]]])
    marked = protected(one, torch.tensor([[[3]]]), valid, 7)
    assert torch.where(marked[0, 0])[0].tolist() == [1, 5]
    assert torch.where(protected(one, torch.tensor([[[5]]]), None, 7)[0, 0])[0].tolist() == [0, 5, 6]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31))
def test_equals_sorting_each_region_by_hand(slots, regions, seed):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 2, slots, generator=draw).mul(2).round().div(2)
    ids = torch.randint(0, regions, (2, 2, slots), generator=draw)
    valid, must = torch.rand(2, 2, slots, generator=draw) < 0.8, torch.rand(2, 2, slots, generator=draw) < 0.2
    expected, quotas = torch.zeros(2, 2, slots, dtype=torch.bool), torch.zeros(2, 2, regions, dtype=torch.long)
    for row, head, region in ((r, h, g) for r in range(2) for h in range(2) for g in range(regions)):
        members = torch.where((ids[row, head] == region) & valid[row, head])[0].tolist()
        forced = sum(bool(must[row, head, slot]) for slot in members)
        quota = int(torch.randint(forced, len(members) + 1, (), generator=draw))
        quotas[row, head, region] = quota
        members.sort(key=lambda slot: (not must[row, head, slot], -scores[row, head, slot].item(), slot))
        expected[row, head, members[:quota]] = True
    assert torch.equal(select(scores, quotas, Partition.of_ids(ids, regions), must, valid), expected)
