"""CommunityQuota's mass, quotas and slots against loops over Python numbers, for communities that are given.

How the graph is cut is Leiden's business (`test_community_quota.py`); what a community may keep follows from its slots alone.
"""

import math
import random

import pytest
import torch

from kvstitch.allocators import CommunityQuota
from kvstitch.views import LayerView, QueryWindow

SLOTS = 60


class GivenCommunities(CommunityQuota):
    """Communities that a test gives, instead of those of a graph."""

    def given(self, ids):
        object.__setattr__(self, "_given", ids)
        return self

    def _cut_all(self, view, carried):
        return self._given, torch.zeros(*self._given.shape[:2], 2)


def window_mass(view, row, head, window_tokens, num_sinks):
    """Mean attention that each valid slot gets from the recent queries that see it, over the group; sinks get nothing."""
    present = torch.where(view.valid[row, head])[0].tolist()
    places = view.queries.positions[row].tolist()
    group = view.queries.rotated.shape[1] // view.keys.shape[1]
    total, watchers = dict.fromkeys(present, 0.0), dict.fromkeys(present, 0)
    for w in range(len(places))[-window_tokens:]:
        seen = [slot for slot in present if int(view.positions[row, head, slot]) <= places[w]]
        for slot in seen:
            watchers[slot] += 1
        for g in range(group):
            query = view.queries.rotated[row, head * group + g, w].tolist()
            logits = [
                view.scaling * sum(a * b for a, b in zip(query, view.keys[row, head, slot].tolist())) for slot in seen
            ]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for slot, weight in zip(seen, weights):
                total[slot] += weight / sum(weights) / group
    mass = {slot: total[slot] / max(watchers[slot], 1) for slot in present}
    return mass | dict.fromkeys(present[:num_sinks], 0.0)


def community_event(loops, allocator, view, scores, ids, keep, row, head):
    """Slots of one head, and quota and length of each community that has slots."""
    present = torch.where(view.valid[row, head])[0].tolist()
    mass = window_mass(view, row, head, allocator.window_tokens, allocator.num_sinks)
    keep = min(keep, len(present))
    must = loops.protected(present, keep, allocator.num_sinks, allocator.num_recent, allocator.must_priority)
    members = {}
    for slot in present:
        members.setdefault(ids[slot], []).append(slot)
    regions = sorted(members)
    quotas = loops.quotas(
        [len(members[region]) for region in regions],
        [sum(mass[slot] for slot in members[region]) for region in regions],
        [len(must & set(members[region])) for region in regions],
        keep,
        allocator.min_keep_tokens,
    )
    kept = []
    for region, quota in zip(regions, quotas):
        rest = loops.best_first(scores, [slot for slot in members[region] if slot not in must])
        kept += (sorted(must & set(members[region])) + rest)[:quota]
    return sorted(kept), dict(zip(regions, quotas)), {region: len(slots) for region, slots in members.items()}


def assert_equals_loops(loops, allocator, view, scores, ids, keep, selection):
    details = selection.details
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            arguments = view, scores[row, head].tolist(), ids[row, head].tolist(), keep[row], row, head
            kept, quotas, lengths = community_event(loops, allocator, *arguments)
            slots = selection.slots[row, head]
            assert slots[slots >= 0].tolist() == kept
            told = [dict(enumerate(details[name][row, head].tolist())) for name in ("quotas", "lengths")]
            assert [{region: n for region, n in one.items() if region in quotas} for one in told] == [quotas, lengths]
            assert sum(told[0].values()) == len(kept)


@pytest.mark.parametrize("seed", range(12))
def test_over_drawn_communities(make_view, loops, seed):
    draw = random.Random(seed)
    holes = torch.zeros(2, 3, SLOTS, dtype=torch.bool)
    holes[1, :, : draw.randint(0, 9)] = True
    holes[0, 1, 30 : 30 + draw.randint(0, 9)] = True
    view = make_view(slots=SLOTS, window=10, holes=holes, seed=seed)
    # From two communities of most slots to more of them than the floors can be paid for.
    number = draw.choice([2, 5, 14, 40])
    weights = [draw.random() ** 3 + 0.01 for _ in range(number)]
    ids = torch.tensor([[draw.choices(range(number), weights, k=SLOTS) for _ in range(3)] for _ in range(2)])
    ids = ids.masked_fill(~view.valid, 0)
    allocator = GivenCommunities(
        window_tokens=draw.choice([1, 6, 10]),
        min_keep_tokens=draw.choice([0, 1, 3]),
        num_sinks=draw.choice([0, 3]),
        num_recent=draw.choice([0, 7]),
        must_priority=draw.choice(["sink", "suffix"]),
    ).given(ids)
    scores = (torch.rand(2, 3, SLOTS, generator=torch.Generator().manual_seed(seed)) * 20).round() / 20
    scores = torch.where(scores == 0.5, torch.nan, scores)
    keep = [draw.randint(1, 12), draw.randint(8, 70)]
    selection = allocator.allocate(view, scores, torch.tensor(keep), {})
    assert_equals_loops(loops, allocator, view, scores, ids, keep, selection)


def test_over_communities_of_a_graph_and_what_is_carried_on(make_view, loops):
    """Two events: the second meets communities that the first one carried, and new slots."""
    allocator = CommunityQuota(window_tokens=12, top_k=3, num_sinks=2, num_recent=4, target_tokens=6)
    first, second = make_view(window=12, seed=1), make_view(window=12, slots=40, seed=2)
    state = {}
    for view, keep in ((first, [20, 26]), (second, [17, 30])):
        scores = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(keep[0]))
        ids = allocator.communities(view, state.get("community"))
        selection = allocator.allocate(view, scores, torch.tensor(keep), state)
        assert_equals_loops(loops, allocator, view, scores, ids, keep, selection)
        state = selection.state


def test_by_hand():
    """One query pays 5 parts of 24 to each slot of community 0, and 1 part to each of the others.

    Masses 20, 3 and 1 of 24; 5 to keep, 1 for each community at least. Community 2 has 1 slot and is full, so the others
    share 4: 1 + θ 20/24 and 1 + θ 3/24 with θ = 48/23, which is 2.74 and 1.26. The last one goes to the larger fraction.
    """
    weights = torch.tensor([5.0, 1, 5, 1, 5, 1, 5, 1])
    keys = torch.stack((weights.log(), torch.zeros(8)), dim=-1)[None, None]
    view = LayerView(
        keys=keys,
        values=keys,
        positions=torch.arange(8)[None, None],
        valid=torch.ones(1, 1, 8, dtype=torch.bool),
        scaling=1.0,
        next_position=torch.tensor([8]),
        layer_idx=0,
        num_layers=1,
        queries=QueryWindow(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[7]])),
    )
    allocator = GivenCommunities(window_tokens=1, num_sinks=0, num_recent=0)
    selection = allocator.given(torch.tensor([[[0, 1, 0, 1, 0, 1, 0, 2]]])).allocate(
        view, torch.tensor([[[1.0, 8, 2, 7, 3, 6, 4, 5]]]), torch.tensor([5]), {}
    )
    assert selection.details["quotas"].tolist() == [[[3, 1, 1]]]
    assert selection.slots.tolist() == [[[1, 2, 4, 6, 7]]]
