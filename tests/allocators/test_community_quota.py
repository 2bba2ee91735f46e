"""Quotas for communities: the budget is met, regions are linked by the window, old ones are carried along."""

import pytest
import torch

from kvstitch.allocators.community_quota import CommunityQuota

SMALL = dict(window_tokens=12, top_k=3, num_sinks=2, num_recent=4, target_tokens=6)


def scores_of(view, seed=0):
    return torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(seed))


def test_budget_protection_and_quotas(make_view):
    holes = torch.zeros(2, 3, 60, dtype=torch.bool)
    holes[1, :, :7] = True
    view = make_view(holes=holes, window=12)
    allocator = CommunityQuota(**SMALL)
    selection = allocator.allocate(view, scores_of(view), torch.tensor([20, 26]), {})
    counts = (selection.slots >= 0).sum(-1)
    assert counts.tolist() == [[20] * 3, [26] * 3]
    assert torch.equal(selection.details["quotas"].sum(-1), counts)
    assert (selection.details["quotas"] <= selection.details["lengths"]).all()
    for row in range(2):
        for head in range(3):
            kept = [s for s in selection.slots[row, head].tolist() if s >= 0]
            first = 7 if row else 0
            assert kept == sorted(set(kept)) and {first, first + 1, 56, 57, 58, 59} <= set(kept)


def test_every_community_keeps_its_quota_of_best_scores(make_view):
    view = make_view(window=12)
    allocator = CommunityQuota(**(SMALL | dict(num_sinks=0, num_recent=0)))
    scores = scores_of(view)
    selection = allocator.allocate(view, scores, torch.tensor([25, 25]), {})
    ids = allocator.communities(view)
    for row in range(2):
        for head in range(3):
            kept = set(selection.slots[row, head].tolist())
            for region, quota in enumerate(selection.details["quotas"][row, head].tolist()):
                members = [s for s in range(60) if ids[row, head, s] == region]
                best = sorted(members, key=lambda s: -float(scores[row, head, s]))[:quota]
                assert kept & set(members) == set(best)
            assert min(selection.details["quotas"][row, head][selection.details["lengths"][row, head] > 0]) >= 1


def test_keys_that_queries_attend_to_together_are_together(make_view):
    """Two groups of keys, and queries that look at one group each."""
    view = make_view(batch=1, heads=1, group=1, slots=40, window=12, head_dim=8)
    view.keys[:] = 0
    view.keys[0, 0, :8, 0], view.keys[0, 0, 8:16, 1] = 9, 9
    view.queries.rotated[:] = 0
    view.queries.rotated[0, 0, ::2, 0], view.queries.rotated[0, 0, 1::2, 1] = 9, 9
    allocator = CommunityQuota(window_tokens=12, top_k=4, num_sinks=0, num_recent=1, target_tokens=4, min_mean_tokens=1)
    ids = allocator.communities(view)[0, 0]
    weights, columns = allocator._edges(view)
    linked = set(columns[0, 0, weights[0, 0] > 1e-3].tolist())
    first, second = {int(ids[s]) for s in linked if s < 8}, {int(ids[s]) for s in linked if s >= 8}
    assert len(first) == len(second) == 1 and not first & second
    # Two communities of equal degree without an edge between them: 1 - gamma / 2.
    details = allocator.allocate(view, scores_of(view), torch.tensor([20]), {}).details
    assert details["modularity"].shape == (1, 1) and details["resolution"].item() > 0
    assert details["modularity"].item() == pytest.approx(1 - details["resolution"].item() / 2, abs=1e-4)


def test_slots_without_links_keep_their_community(make_view):
    view = make_view(window=12)
    allocator = CommunityQuota(**(SMALL | dict(min_mean_tokens=1)))
    carried = torch.arange(50).expand(2, 3, 50) // 25 * 7
    ids = allocator.communities(view, carried)
    weights, columns = allocator._edges(view)
    for row in range(2):
        for head in range(3):
            linked = set(columns[row, head][weights[row, head] > 1e-5].tolist())
            for half in (range(25), range(25, 50)):
                alone = {int(ids[row, head, s]) for s in half if s not in linked}
                assert len(alone) <= 1
            new = {int(ids[row, head, s]) for s in range(50, 60) if s not in linked}
            assert len(new) <= 1


def test_state_is_aligned_with_what_is_kept(make_view):
    view = make_view(window=12)
    allocator = CommunityQuota(**SMALL)
    selection = allocator.allocate(view, scores_of(view), torch.tensor([20, 20]), {})
    ids = allocator.communities(view)
    assert torch.equal(selection.state["community"], ids.gather(-1, selection.slots))


def test_a_budget_above_the_length_keeps_everything(make_view):
    view = make_view(window=12)
    selection = CommunityQuota(**SMALL).allocate(view, scores_of(view), torch.tensor([99, 99]), {})
    assert torch.equal(selection.slots, torch.arange(60).expand(2, 3, 60))


@pytest.mark.parametrize("name", ["window_tokens", "top_k", "target_tokens", "min_mean_tokens", "run_tokens"])
def test_impossible_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        CommunityQuota(**{name: 0})


def test_queries_are_asked_for(make_view):
    assert CommunityQuota(window_tokens=9).needs.queries == 9
    view = make_view(window=12)
    from dataclasses import replace

    with pytest.raises(ValueError, match="needs the last 9"):
        CommunityQuota(window_tokens=9).communities(replace(view, queries=None))


def test_a_row_that_loses_nothing_keeps_its_communities(make_view):
    view = make_view(window=12)
    allocator = CommunityQuota(**SMALL)
    carried = torch.arange(50).remainder(7).expand(2, 3, 50).clone()
    selection = allocator.allocate(view, scores_of(view), torch.tensor([20, 60]), {"community": carried})
    assert torch.equal(selection.state["community"][1, :, :50], carried[1])
    assert (selection.state["community"][1, :, 50:] == -1).all()
    assert not torch.equal(selection.state["community"][0, :, :20], carried[0, :, :20])
