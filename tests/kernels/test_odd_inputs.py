"""What a kernel may meet beside well-spread random numbers: ties throughout, one token, garbage where nobody looks."""

import itertools

import pytest
import torch

from kvstitch.kernels.compact import compact
from kvstitch.kernels.sparse_decode import sparse_decode
from kvstitch.kernels.topk_attention import topk_attention, topk_edges

WAYS = [dict(group_mean="exact"), dict(group_mean="merged"), dict(aggregation="per_head")]


def few_keys(batch, query_heads, heads, num_queries, num_keys, dim, seed=0):
    """Keys that are copies of three, and small whole numbers, so that no product is rounded and equal ones are equal."""
    generator = torch.Generator().manual_seed(seed)
    whole = lambda *shape: torch.randint(-1, 2, shape, generator=generator).float()
    copies = torch.randint(0, 3, (batch, heads, num_keys), generator=generator)
    return whole(batch, query_heads, num_queries, dim), whole(3, dim)[copies]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ties_over_several_tiles_are_broken_alike(way, dtype, run_triton):
    query, key = (x.to(dtype) for x in few_keys(1, 2, 1, 9, 100, 16))
    options = dict(scaling=0.25, top_k=5, num_sinks=3) | way
    found = run_triton(topk_attention, query, key, key, **options).result
    expected = topk_attention(query.double(), key.double(), key.double(), **options)
    assert (expected.weights.diff(dim=-1) == 0).float().mean() > 0.4, "the case must have ties"
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(topk_attention(query, key, key, **options).indices, expected.indices)


def test_ties_over_several_splits_are_broken_alike(run_triton):
    query, keys = few_keys(1, 4, 2, 1, 200, 16)
    slots = torch.rand(1, 2, 200, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)[..., :170]
    options = dict(scaling=0.25, top_k=6, first_candidate=4)
    found = run_triton(sparse_decode, query, keys, keys, slots, **options).result
    expected = sparse_decode(query.double(), keys.double(), keys.double(), slots, **options)
    assert (expected.weights.diff(dim=-1) == 0).any(), "the case must have ties"
    assert torch.equal(found.slots, expected.slots)
    assert torch.equal(sparse_decode(query, keys, keys, slots, **options).slots, expected.slots)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_keys", [1, 2])
def test_one_query(num_keys, way, run_triton):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, 64, generator=generator) for heads, n in ((4, 1), (2, num_keys), (2, num_keys))
    )
    found = run_triton(topk_attention, query, key, value, 0.2, top_k=2, num_sinks=1, **way).result
    expected = topk_attention(query, key, value, 0.2, top_k=2, num_sinks=1, **way)
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(found.weights, expected.weights)
    assert torch.equal(found.indices, expected.indices)
    assert (found.indices[..., 1:] == -1).all() and (found.indices[..., 0] == (1 if num_keys == 2 else -1)).all()


def test_more_heads_in_a_group_than_rows_in_a_tile(run_triton):
    """71 heads over one kv head, as Falcon-7B."""
    query, key = few_keys(1, 71, 1, 5, 9, 16)
    options = dict(scaling=0.25, top_k=4, num_sinks=1)
    found = run_triton(topk_attention, query, key, key, **options).result
    expected = topk_attention(query, key, key, **options)
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(found.weights, expected.weights)
    assert torch.equal(found.indices, expected.indices)


def test_nothing_but_sinks_gives_no_edges(run_triton):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 2, 20, 16, generator=generator), torch.randn(1, 1, 20, 16, generator=generator)
    for way in WAYS:
        edges = run_triton(topk_edges, query, key, 0.2, 2, 50, **way).result
        assert (edges.indices == -1).all() and (edges.weights == 0).all()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_garbage_in_the_padding_reaches_no_edge(way, run_triton):
    """A row may be padding altogether; what stands there, NaN included, changes nothing."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(3, 4, 20, 16, generator=generator), torch.randn(3, 2, 20, 16, generator=generator)
    first = torch.tensor([20, 13, 0])
    clean = topk_edges(query, key, 0.2, 3, first_key=first, **way)
    for row in (0, 1):
        query[row, :, : first[row]] = key[row, :, : first[row]] = float("nan")
    for edges in (
        run_triton(topk_edges, query, key, 0.2, 3, first_key=first, **way).result,
        topk_edges(query, key, 0.2, 3, first_key=first, **way),
    ):
        torch.testing.assert_close(edges.weights, clean.weights)
        assert torch.equal(edges.indices, clean.indices)


@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 80), (torch.float16, 96), (torch.bfloat16, 64)])
def test_sparse_decode_with_soft_cap_and_sink_logits_in_half_precision(dtype, head_dim, run_triton, assert_as_accurate):
    generator = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    query, keys, values, sinks = new(2, 6, 1, head_dim), new(2, 2, 90, head_dim), new(2, 2, 90, head_dim), new(6)
    keys[:, :, 80:] = values[:, :, 80:] = float("nan")
    slots = torch.rand(2, 2, 80, generator=generator).argsort(dim=-1)[..., :57]
    slots[0, 1, 30:], slots[1, 0, ::3] = -1, -1
    options = dict(softcap=2.0, top_k=4, first_candidate=5)
    found = run_triton(sparse_decode, query, keys, values, slots, 0.2, sink_logits=sinks, **options).result
    rounded = sparse_decode(query, keys, values, slots, 0.2, sink_logits=sinks, **options)
    doubles = (x.double() for x in (query, keys, values))
    exact = sparse_decode(*doubles, slots, 0.2, sink_logits=sinks.double(), **options)
    # Probabilities are rounded before they meet the values, which the reference, in float32, does not do.
    assert_as_accurate("output", found.output, rounded.output, exact.output, magnitude=2)
    assert_as_accurate("weights", found.weights, rounded.weights, exact.weights, magnitude=4)
    assert torch.equal(found.slots, exact.slots)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_in_place_is_right_for_every_ascending_list(impl, request):
    """All 63 ways to keep some of six slots, a head each."""
    kept = [list(way) for number in range(1, 7) for way in itertools.combinations(range(6), number)]
    slots = torch.tensor([way + [-1] * (6 - len(way)) for way in kept])[None]
    tensor = torch.arange(63 * 6 * 3, dtype=torch.float32).view(1, 63, 6, 3)
    expected = tensor.clone()
    for head, way in enumerate(kept):
        expected[0, head, : len(way)] = tensor[0, head, way]
    moved = tensor.clone()
    if impl == "triton":
        ((moved,), *_) = request.getfixturevalue("run_triton")(compact, [moved], slots).arguments
    else:
        compact([moved], slots)
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_garbage_in_the_padding_reaches_no_output(way, run_triton):
    """Keys and values of padding hold NaN; the first tile of the row holds padding and tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    first = torch.tensor([33, 5])
    expected = topk_attention(query, key, value, 0.2, 3, first_key=first, **way)
    for row in range(2):
        key[row, :, : first[row]] = value[row, :, : first[row]] = float("nan")
    found = run_triton(topk_attention, query, key, value, 0.2, 3, first_key=first, **way).result
    for row in range(2):
        torch.testing.assert_close(found.output[row, :, first[row] :], expected.output[row, :, first[row] :])
        assert torch.equal(found.indices[row, :, first[row] :], expected.indices[row, :, first[row] :])


def test_an_impossible_choice_is_refused_also_where_nothing_is_to_be_done():
    with pytest.raises(ValueError, match="impl must be one of"):
        compact([], torch.zeros(1, 1, 2, dtype=torch.int64), impl="cuda")
