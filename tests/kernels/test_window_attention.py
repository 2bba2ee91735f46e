"""Window attention against its definition in float64 loops."""

import pytest
import torch

from kvstitch.kernels.window_attention.api import window_attention, window_usage, window_usage_layers


def make(batch=2, heads=2, group=3, window=5, slots=17, head_dim=8, seed=0, dtype=torch.float32):
    """Unordered positions with gaps, the window in the middle of them, empty slots and missing queries."""
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads * group, window, head_dim, generator=draw).to(dtype)
    keys = torch.randn(batch, heads, slots, head_dim, generator=draw).to(dtype)
    positions = torch.stack([torch.randperm(40, generator=draw)[:slots] for _ in range(batch * heads)])
    positions = positions.view(batch, heads, slots)
    positions[0, 0, :4] = positions[0, 1, 3:9] = -1
    query_positions = torch.arange(20, 20 + window).expand(batch, window).clone()
    query_positions[0, :2] = -1
    return queries, query_positions, keys, positions, 0.7


def by_definition(queries, query_positions, keys, positions, scaling):
    batch, heads, slots, _ = keys.shape
    group, window = queries.shape[1] // heads, queries.shape[2]
    result = torch.zeros(batch, heads, group, window, slots, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for g in range(group):
                for w in range(window):
                    seen = [j for j in range(slots) if 0 <= positions[b, h, j] <= query_positions[b, w]]
                    if not seen or query_positions[b, w] < 0:
                        continue
                    query = queries[b, h * group + g, w].double()
                    logits = torch.stack([scaling * query @ keys[b, h, j].double() for j in seen])
                    result[b, h, g, w, seen] = (logits - logits.max()).exp() / (logits - logits.max()).exp().sum()
    return result


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)])
def test_equals_its_definition(dtype, tolerance):
    """Half precision is widened before anything is multiplied, so it costs no accuracy here."""
    layer = make(dtype=dtype)
    result, expected = window_attention(*layer), by_definition(*layer)
    assert result.dtype == torch.float32 and result.shape == (2, 2, 3, 5, 17)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)
    assert (result == 0)[expected == 0].all()


def test_rows_sum_to_one_or_are_zero():
    queries, query_positions, keys, positions, scaling = make()
    # Row 1: the first two queries stand before every token of head 0.
    positions[1, 0] = positions[1, 0].clamp(min=22)
    sums = window_attention(queries, query_positions, keys, positions, scaling).sum(dim=-1)
    expected = torch.ones(2, 2, 3, 5)
    expected[0, :, :, :2] = 0
    expected[1, 0, :, :2] = 0
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("function", [window_attention, window_usage])
def test_what_stands_on_empty_slots_does_not_matter(function, poison):
    queries, query_positions, keys, positions, scaling = make()
    clean = function(queries, query_positions, keys, positions, scaling)
    keys = torch.where((positions < 0)[..., None], poison, keys)
    missing = (query_positions < 0)[:, None, :, None]
    queries = torch.where(missing, poison, queries)
    assert torch.equal(function(queries, query_positions, keys, positions, scaling), clean)


def test_order_and_holes_do_not_matter():
    """The same tokens, compacted with their true positions or in place between evicted ones, are attended to alike."""
    queries, query_positions, keys, positions, scaling = make(batch=1)
    whole = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(1))
    places = torch.full((1, 2, 40), -1)
    order = positions.clamp(min=0)
    for head in range(2):
        for slot, position in enumerate(positions[0, head].tolist()):
            if position >= 0:
                whole[0, head, position], places[0, head, position] = keys[0, head, slot], position
    result = window_attention(queries, query_positions, whole, places, scaling)
    compact = window_attention(queries, query_positions, keys, positions, scaling)
    picked = result.gather(-1, order[:, :, None, None].expand_as(compact))
    torch.testing.assert_close(picked * (positions >= 0)[:, :, None, None], compact)


def test_usage_is_the_mean_over_the_queries_that_see_a_slot():
    layer = make()
    expected, positions, query_positions = by_definition(*layer), layer[3], layer[1]
    sees = (positions[:, :, None] >= 0) & (positions[:, :, None] <= query_positions[:, None, :, None])
    mean = expected.sum(dim=(2, 3)) / (3 * sees.sum(dim=2).clamp(min=1))
    torch.testing.assert_close(window_usage(*layer).double(), mean, rtol=0, atol=1e-6)


def test_layers_together_equal_layers_one_by_one():
    layers = [make(seed=seed) for seed in range(3)]
    queries, query_positions, keys, positions, scaling = zip(*layers)
    result = window_usage_layers(queries, torch.cat(query_positions), keys, torch.cat(positions), scaling)
    for layer, own in zip(layers, result.chunk(3)):
        assert torch.equal(own, window_usage(*layer))


def test_far_positions_are_compared_exactly():
    """Float32 cannot tell 2**24 + 1 from 2**24."""
    far = 2**24
    keys, queries = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 2, 4)
    positions, query_positions = torch.tensor([[[0, far, far + 1]]]), torch.tensor([[far, far + 1]])
    result = window_attention(queries, query_positions, keys, positions, 1.0)[0, 0, 0]
    torch.testing.assert_close(result, torch.tensor([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"queries": torch.zeros(2, 5, 5, 8)}, "query heads must be a multiple of the 2 kv heads, got 5"),
        ({"queries": torch.zeros(2, 6, 4, 8)}, "queries must have shape"),
        ({"positions": torch.zeros(2, 2, 16, dtype=torch.long)}, "positions must have shape"),
        ({"query_positions": torch.zeros(1, 5, dtype=torch.long)}, "query_positions must have shape"),
    ],
)
def test_disagreeing_shapes_are_refused(change, message):
    names = ("queries", "query_positions", "keys", "positions", "scaling")
    with pytest.raises(ValueError, match=message):
        window_attention(**(dict(zip(names, make())) | change))
