import dataclasses

import pytest
import torch

from kvstitch.kernels.community_update import Communities, community_update

FIRST = 40


def state(batch=2, heads=3, length=90, capacity=9, dim=20, existing=6, seed=0):
    """Slots 4 .. FIRST are labelled (the first four are sinks); the token that comes next has slot FIRST."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.full((batch, heads, length), -1, dtype=torch.int32)
    labels[:, :, 4:FIRST] = torch.randint(0, existing, (batch, heads, FIRST - 4), generator=generator).int()
    sizes = torch.stack([(labels == community).sum(-1) for community in range(capacity)], dim=-1).int()
    centroids = torch.randn(batch, heads, capacity, dim, generator=generator)
    degrees = torch.rand(batch, heads, capacity, generator=generator)
    centroids[:, :, existing:] = 0
    degrees[:, :, existing:] = 0
    count = torch.full((batch, heads), existing, dtype=torch.int32)
    return Communities(labels, centroids, sizes, degrees, degrees.sum(-1), count)


def tokens(count, batch=2, heads=3, dim=20, edges=5, seed=1):
    """Arguments of successive calls: own edges, edges to sinks, missing edges, rows without edges, finished rows."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        slot = torch.full((batch,), FIRST + step)
        if step % 7 == 3:
            slot[-1] = -1
        keys = torch.randn(batch, heads, dim, generator=generator)
        chosen = torch.rand(batch, heads, FIRST + step, generator=generator).argsort(-1)[..., :edges].int()
        chosen[:, 0, 0] = FIRST + step
        chosen[0, 1, 3:] = -1
        if step % 9 == 5:
            chosen[:, 2] = -1
        weights = torch.rand(batch, heads, edges, generator=generator) / edges
        resolution, share = (0.3, 1.0, 4.0)[step % 3], (0.5, 0.0, 1.0)[step // 3 % 3]
        yield keys, slot, chosen, weights, resolution, share


def copy(communities, dtype=torch.float32):
    moved = {f.name: getattr(communities, f.name).clone() for f in dataclasses.fields(communities)}
    return Communities(**{name: t.to(dtype) if t.is_floating_point() else t for name, t in moved.items()})


def by_loops(communities, key, slot, edge_slots, edge_weights, resolution, share):
    """One row and head after the other, one edge after the other, in float64."""
    chosen = torch.full(communities.count.shape, -1)
    for row, head in torch.cartesian_prod(*(torch.arange(size) for size in chosen.shape)).tolist():
        token = int(slot[row])
        if token < 0:
            continue
        one = {f.name: getattr(communities, f.name)[row, head] for f in dataclasses.fields(communities)}
        labels, degrees, capacity = one["labels"], one["degrees"], one["sizes"].shape[0]
        alpha = {int(s): float(w) for s, w in zip(edge_slots[row, head], edge_weights[row, head]) if s >= 0}
        own = alpha.pop(token, 0.0)
        alpha = {s: w for s, w in alpha.items() if labels[s] >= 0}
        edge = {s: share / 2 * w + (1 - share) * own * w for s, w in alpha.items()}
        for s, weight in edge.items():
            degrees[labels[s]] += weight
            one["total_degree"] += 2 * weight
        for a in alpha:
            for b in alpha:
                if a < b:
                    pair = (1 - share) * alpha[a] * alpha[b]
                    degrees[labels[a]] += pair
                    degrees[labels[b]] += pair
                    one["total_degree"] += 2 * pair
        own_degree = sum(edge.values())
        gains = {}
        for s, weight in edge.items():
            gains[int(labels[s])] = gains.get(int(labels[s]), 0.0) + weight
        total = float(one["total_degree"])
        gains = {c: g - (resolution * own_degree * float(degrees[c]) / total if total else 0) for c, g in gains.items()}
        full = int(one["count"]) == capacity
        best = max(gains.values(), default=-1.0)
        if best > 0 or (full and gains):
            community = min(c for c, g in gains.items() if g == best)
        elif full:
            community = capacity - 1
        else:
            community = int(one["count"])
            one["count"] += 1
        labels[token] = community
        one["sizes"][community] += 1
        degrees[community] += own_degree
        one["centroids"][community] += (key[row, head].double() - one["centroids"][community]) / one["sizes"][community]
        chosen[row, head] = community
    return chosen


def assert_same(found, expected, tolerance=1e-5):
    for field in dataclasses.fields(found):
        actual, want = getattr(found, field.name), getattr(expected, field.name)
        if want.is_floating_point():
            torch.testing.assert_close(actual.double(), want.double(), atol=tolerance, rtol=1e-5, msg=field.name)
        else:
            assert torch.equal(actual, want), field.name


def test_reference_equals_loops_over_many_tokens():
    found, expected = state(), copy(state(), torch.float64)
    opened = 0
    for arguments in tokens(45):
        chosen = community_update(found, *arguments)
        want = by_loops(expected, *arguments)
        assert torch.equal(chosen.long(), want)
        opened += int((want >= 6).sum())
    assert_same(found, expected)
    assert opened > 0 and (found.count == found.sizes.shape[2]).all(), "the case must fill the table"


def test_triton_equals_loops_over_many_tokens(run_triton):
    found, expected = state(), copy(state(), torch.float64)
    for arguments in tokens(14):
        ran = run_triton(community_update, found, *arguments)
        found = ran.arguments[0]
        assert torch.equal(ran.result.long(), by_loops(expected, *arguments))
    assert_same(found, expected)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_triton_updates_centroids_of_any_head_dim(head_dim, run_triton):
    before = state(batch=1, heads=2, dim=head_dim)
    key, slot, edge_slots, edge_weights, _, _ = next(tokens(1, batch=1, heads=2, dim=head_dim))
    # A view, as the keys of a step come out of the cache.
    key = torch.stack((key, key + 1), dim=2)[:, :, 0]
    expected = copy(before, torch.float64)
    chosen = by_loops(expected, key, slot, edge_slots, edge_weights, 0.3, 0.5)
    ran = run_triton(community_update, before, key.half(), slot, edge_slots, edge_weights, 0.3, 0.5)
    assert torch.equal(ran.result.long(), chosen)
    assert_same(ran.arguments[0], expected, tolerance=2e-3)


def test_an_untouched_row_keeps_everything():
    found, before = state(), state()
    key, _, edge_slots, edge_weights, resolution, share = next(tokens(1))
    chosen = community_update(found, key, torch.tensor([-1, -1]), edge_slots, edge_weights, resolution, share)
    assert (chosen == -1).all()
    assert_same(found, before, tolerance=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_no_edge(value, run_triton):
    """Also where no room is left, so that the token must join somebody."""
    key, slot, edge_slots, edge_weights, resolution, share = next(tokens(1))
    broken, without = edge_weights.clone(), edge_weights.clone()
    broken[..., 0], without[..., 0] = value, 0.0
    for count in (3, state().sizes.shape[2]):
        expected = state()
        expected.count.fill_(count)
        found = copy(expected, torch.float32)
        before = copy(expected, torch.float32)
        want = community_update(expected, key, slot, edge_slots, without, resolution, share)
        assert torch.equal(community_update(found, key, slot, edge_slots, broken, resolution, share), want)
        assert_same(found, expected, tolerance=0)
        ran = run_triton(community_update, before, key, slot, edge_slots, broken, resolution, share)
        assert torch.equal(ran.result, want)
        assert_same(ran.arguments[0], expected)


def test_degrees_that_are_not_finite_lead_to_no_wrong_place(run_triton):
    """What is chosen means nothing, but it is a community."""
    for count in (3, state().sizes.shape[2]):
        broken = state()
        broken.count.fill_(count)
        broken.degrees.fill_(float("nan"))
        arguments = next(tokens(1))
        chosen = run_triton(community_update, copy(broken, torch.float32), *arguments).result
        assert ((chosen >= 0) & (chosen < broken.sizes.shape[2])).all()
        assert torch.equal(chosen, community_update(broken, *arguments))


def test_what_lies_past_the_edges_does_not_matter():
    """The update reads E labels: neither a longer sequence nor other labels change it."""
    short, long = state(), state(length=500)
    long.labels[:, :, FIRST + 1 :] = 3
    key, slot, edge_slots, edge_weights, resolution, share = next(tokens(1))
    assert torch.equal(
        community_update(short, key, slot, edge_slots, edge_weights, resolution, share),
        community_update(long, key, slot, edge_slots, edge_weights, resolution, share),
    )
    torch.testing.assert_close(short.degrees, long.degrees)


def test_refusals():
    key, slot, edge_slots, edge_weights, _, _ = next(tokens(1))
    with pytest.raises(ValueError, match="resolution must be positive, got 0"):
        community_update(state(), key, slot, edge_slots, edge_weights, 0.0)
    with pytest.raises(ValueError, match=r"direct_share must be in \[0, 1\], got 1.5"):
        community_update(state(), key, slot, edge_slots, edge_weights, 1.0, direct_share=1.5)
