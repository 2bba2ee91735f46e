"""Pages, clusters, windows, the oracle and static eviction: each by its own definition."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from kvstitch.allocators import CommunityQuota
from kvstitch.allocators.retrieval import (
    ClusterRetrieval,
    CommunityRetrieval,
    GraphEviction,
    OracleRetrieval,
    PageRetrieval,
    WindowRetrieval,
)
from kvstitch.allocators.retrieval.geometry import QueryGeometry
from kvstitch.allocators.retrieval.kmeans import kmeans, refined
from kvstitch.allocators.retrieval.partition import leiden
from kvstitch.allocators.retrieval.static import decayed_ranking

SINKS, RECENT = 3, 5


def positions_read(layer, reads):
    by_selection = layer.positions.repeat_interleave(reads.slots.shape[1] // layer.heads, dim=1)
    return by_selection.gather(2, reads.slots.clamp(min=0)).masked_fill(reads.slots < 0, -1)


def after_steps(layer, allocator, plan, steps=7):
    index = allocator.start(layer.frame(SINKS))
    layer.permute(index.build(layer.view(), plan))
    for _ in range(steps):
        layer.append()
        reads = index.select(layer.step())
    return index, reads


def test_bounds_are_bounds(make_layer, read_plan):
    """Quest: the rating of a page is at least the largest q.k of its tokens, new ones included."""
    layer = make_layer(padding=(0, 7))
    index, _ = after_steps(layer, PageRetrieval(page_size=4), read_plan(26, SINKS, RECENT), steps=11)
    store, dim = index.store, layer.dim
    assert torch.equal(store.counts, store.sizes)
    for row in range(2):
        for head in range(2):
            for page in range(store.num):
                start, size = int(store.starts[row, head, page]), int(store.sizes[row, head, page])
                if size == 0:
                    continue
                positions = layer.positions[row, head, start : start + size].tolist()
                keys = torch.stack([layer.key(row, head, p) for p in positions])
                upper, lower = (
                    store.vectors[row, head, :dim, page].double(),
                    store.vectors[row, head, dim:, page].double(),
                )
                assert torch.allclose(upper, keys.amax(0)) and torch.allclose(lower, keys.amin(0))
                assert max(positions) - min(positions) == size - 1 <= 3
                for query in layer.query(row, head):
                    assert torch.maximum(query * upper, query * lower).sum() >= (keys @ query).max() - 1e-9


def test_pages_of_the_largest_bound_are_read_first(make_layer, read_plan):
    layer = make_layer(padding=(0, 0))
    index, reads = after_steps(layer, PageRetrieval(page_size=4), read_plan(SINKS + RECENT + 8, SINKS, RECENT))
    read = positions_read(layer, reads)
    store, dim = index.store, layer.dim
    for row in range(2):
        for head in range(2):
            for member in range(layer.group):
                query = layer.query(row, head)[member]
                bound = lambda page: float(
                    torch.maximum(
                        query * store.vectors[row, head, :dim, page].double(),
                        query * store.vectors[row, head, dim:, page].double(),
                    ).sum()
                )
                pages = sorted((p for p in range(store.num) if store.sizes[row, head, p] > 0), key=bound, reverse=True)
                start, size = int(store.starts[row, head, pages[0]]), int(store.sizes[row, head, pages[0]])
                best = set(layer.positions[row, head, start : start + size].tolist())
                assert best <= set(read[row, head * layer.group + member].tolist())


def test_the_window_is_the_newest(make_layer, read_plan):
    layer = make_layer(padding=(0, 9))
    _, reads = after_steps(layer, WindowRetrieval(), read_plan(26, SINKS, RECENT))
    read = positions_read(layer, reads)
    for row in range(2):
        newest = layer.newest(row)
        wanted = set(range(SINKS)) | set(range(newest - 22, newest + 1))
        assert all(set(read[row, head].tolist()) == wanted for head in range(2))
    assert reads.complete


@pytest.mark.parametrize("select", ["kv_head", "query_head"])
def test_the_oracle_has_the_largest_weights(make_layer, read_plan, select):
    layer = make_layer(padding=(0, 9))
    _, reads = after_steps(layer, OracleRetrieval(select=select), read_plan(26, SINKS, RECENT))
    read = positions_read(layer, reads)
    for row in range(2):
        newest = layer.newest(row)
        for head in range(2):
            keys = torch.stack([layer.key(row, head, p) for p in range(newest + 1)])
            weights = (layer.query(row, head) @ keys.T * layer.scaling).softmax(-1)
            weights = weights.mean(0, keepdim=True) if select == "kv_head" else weights
            for member, weight in enumerate(weights):
                body = weight[SINKS : newest - RECENT + 1]
                best = set((body.topk(18).indices + SINKS).tolist())
                selection = head * len(weights) + member
                assert best == set(read[row, selection, SINKS + RECENT :].tolist())


def test_single_token_clusters_with_replacement_are_dense(make_layer, read_plan):
    """Every token its own cluster, all of them standing in: attention is exact (methods.md section 12, test 10)."""
    from kvstitch.presses.retrieval_attention import attend

    layer = make_layer(padding=(0, 0))
    allocator = ClusterRetrieval(tokens_per_cluster=1, steps=0, replacement=10**6, growth_tokens=1)
    index, reads = after_steps(layer, allocator, read_plan(14, SINKS, RECENT))
    step = layer.step()
    out = attend(step.query, step.keys, step.values, reads, layer.scaling, 0, SINKS).output
    view = layer.view()
    for row in range(2):
        for head in range(2):
            logits = layer.query(row, head) @ view.keys[row, head].double().T * layer.scaling
            dense = logits.softmax(-1) @ view.values[row, head].double()
            assert torch.allclose(out[row, head * 3 : head * 3 + 3, 0].double(), dense, atol=1e-5)


def test_clusters_are_those_of_kmeans(make_layer, read_plan):
    layer = make_layer(padding=(0, 0))
    allocator = ClusterRetrieval(tokens_per_cluster=6, steps=4, seed=3)
    index = allocator.start(layer.frame(SINKS))
    before = layer.view()
    layer.permute(index.build(before, read_plan(26, SINKS, RECENT)))
    body = slice(SINKS, 70 - RECENT)
    for head in range(2):
        expected = kmeans(before.keys[0, head, body], -(-62 // 6), 4, 3)
        label_of = dict(zip(layer.positions[0, head].tolist(), index.known_labels(70)[0, head].tolist()))
        found = [label_of[p] for p in range(SINKS, 70 - RECENT)]
        pairs = set(zip(expected.tolist(), found))
        assert len(pairs) == len(set(expected.tolist())) == len(set(found)), "the same clusters under other numbers"


def test_kmeans_lowers_the_distances_and_labels_the_nearest():
    keys = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    spread = []
    for steps in (0, 1, 4, 12):
        labels = kmeans(keys, 9, steps, seed=0)
        means = torch.stack([keys[labels == c].mean(0) for c in labels.unique()])
        spread.append(float((keys - means[labels.unique(return_inverse=True)[1]]).square().sum()))
    assert spread == sorted(spread, reverse=True) and spread[-1] < spread[0]
    assert torch.equal(kmeans(keys, 9, 3, 1), kmeans(keys, 9, 3, 1))
    assert kmeans(keys[:3], 9, 2, 0).tolist() == [0, 1, 2] and kmeans(keys[:0], 4, 2, 0).numel() == 0


def test_refinement_keeps_to_the_number_of_clusters():
    keys = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(120) // 10
    assert torch.equal(refined(keys, labels, 0, 0), labels)
    new = refined(keys, labels, 5, 0)
    assert new.max() <= 11 and not torch.equal(new, labels)
    assert torch.equal(new, refined(keys, labels, 5, 0))


def test_the_geometry_is_the_mean_difference_of_logits():
    """|k L - k' L|^2 is the mean of (q.(k - k'))^2 over the queries seen, scaled, but for the ridge."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 500, 6, generator=draw) * torch.tensor([3.0, 1, 1, 0.3, 1, 2])
    positions = torch.arange(500).expand(1, 2, 500)
    geometry = QueryGeometry()
    geometry.observe(query, positions)
    keys = torch.randn(30, 6, generator=draw)
    turned = geometry.transform(keys, 0, 1)
    rows = query[0, 2:].reshape(-1, 6)
    logits = keys @ rows.T
    ratios = []
    for i in range(1, 30):
        mean = (logits[0] - logits[i]).square().mean()
        ratios.append(float((turned[0] - turned[i]).square().sum() / mean))
    assert max(ratios) / min(ratios) < 1.15
    assert torch.equal(QueryGeometry().transform(keys, 0, 0), keys)


@pytest.mark.parametrize("value", [math.nan, 0.0, math.inf])
def test_queries_that_tell_nothing_leave_the_keys_alone(value):
    draw = torch.Generator().manual_seed(0)
    query, keys = torch.randn(1, 4, 9, 6, generator=draw), torch.randn(30, 6, generator=draw)
    # The two heads that share the first kv head.
    query[:, :2] = value
    geometry = QueryGeometry()
    geometry.observe(query, torch.arange(9).expand(1, 2, 9))
    assert torch.equal(geometry.transform(keys, 0, 0), keys) and not torch.equal(geometry.transform(keys, 0, 1), keys)


def test_moments_fade_token_by_token_whatever_the_pieces_and_the_padding():
    draw = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 4, 90, 6, generator=draw), torch.randn(5, 6, generator=draw)
    positions = torch.stack((torch.arange(90), torch.arange(90) - 30)).clamp(min=-1)[:, None].expand(2, 2, 90)
    query[1, :, :30] = float("nan")
    whole, pieces = QueryGeometry(), QueryGeometry()
    whole.observe(query, positions)
    for start, end in ((0, 20), (20, 21), (21, 90)):
        pieces.observe(query[:, :, start:end], positions[:, :, :end])
    for row, first in ((0, 0), (1, 30)):
        for head in range(2):
            moment, weight = torch.zeros(6, 6, dtype=torch.float64), 0.0
            for token in range(first, 90):
                fading = (1 - 1 / 1024) ** (89 - token)
                weight += fading
                for one in query[row, 2 * head : 2 * head + 2, token].double():
                    moment += fading * torch.outer(one, one)
            moment /= moment.diagonal().mean()
            expected = keys.double() @ torch.linalg.cholesky(moment + 0.02 * torch.eye(6, dtype=torch.float64))
            for geometry in (whole, pieces):
                assert torch.allclose(geometry.transform(keys, row, head).double(), expected, atol=1e-5)


def ranking_by_loops(importance, graph, count, rounds):
    left, chosen = list(importance), []
    for turn in range(rounds):
        size = count * (turn + 1) // rounds - count * turn // rounds
        picked = sorted((i for i in range(len(left)) if i not in chosen), key=lambda i: (-left[i], -i))[:size]
        chosen += picked
        for i in picked:
            for j in range(len(left)):
                if graph[i, j]:
                    left[j] *= 1 - min(graph[i, j] / graph[i].max(), 1 - 1e-6)
    return chosen


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_chosen_tokens_make_their_neighbours_less_important(rounds):
    draw = np.random.default_rng(0)
    graph = draw.random((20, 20)) * (draw.random((20, 20)) < 0.3)
    graph = np.triu(graph, 1) + np.triu(graph, 1).T
    importance = draw.random(20)
    newest = np.arange(19, -1, -1)
    found = decayed_ranking(importance, csr_matrix(graph), 7, rounds, newest)
    assert found.tolist() == ranking_by_loops(importance, graph, 7, rounds)


def test_static_eviction_reads_the_same_at_every_step(make_layer, read_plan):
    layer = make_layer(padding=(0, 9))
    index = GraphEviction(top_k=3).start(layer.frame(SINKS))
    view = layer.view()
    index.observe(layer.queries[:, :, :70], view.keys, view.positions, True)
    layer.permute(index.build(view, read_plan(26, SINKS, RECENT)))
    reads = []
    for _ in range(4):
        layer.append()
        reads.append(positions_read(layer, index.select(layer.step())))
    for row in range(2):
        for head in range(2):
            retrieved = [set(x[row, head, SINKS + RECENT :].tolist()) for x in reads]
            assert all(each == retrieved[0] for each in retrieved) and len(retrieved[0]) == 18
            received = {p: 0.0 for p in range(70)}
            _, keys, weights, *_ = index._edges.of(row, head).arrays()
            for key, weight in zip(keys, weights):
                received[int(key)] += weight
            assert max(received, key=lambda p: received[p] * (p <= 60 - 9 * row)) in retrieved[0]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(top_k=0), "top_k must be at least 1"),
        (dict(direct_weight=1.5), "direct_weight"),
        (dict(resolution=0), "resolution must be positive, or 'auto'"),
        (dict(resolution=-2.0), "resolution must be positive"),
        (dict(resolution=math.inf), "resolution"),
        (dict(target_tokens=0), "target_tokens must be positive"),
        (dict(aggregation="per_group"), "did you mean 'query_group'"),
        (dict(partition="louvain"), "partition must be one of"),
        (dict(shortlist=0.5), "shortlist must be at least 1"),
        (dict(shortlist=math.nan), "shortlist must be at least 1"),
        (dict(shortlist=math.inf), "shortlist must be finite, got inf; to choose among all keys take OracleRetrieval"),
        (dict(seed=-1), "seed must be at least 0"),
        (dict(seed=2**64), "seed must be less than 2 \\*\\* 64, got 18446744073709551616"),
        (dict(levels="all"), "levels must be an int, or 'auto', got 'all'"),
        (dict(levels=0), "levels must be at least 1"),
        (dict(levels="auto", growth="nearest"), "growth='chunk'"),
        (dict(growth="delta"), "did you mean 'delta_q'"),
        (dict(growth="delta_q"), "resolution of the graph"),
        (dict(growth="delta_q", resolution=1.0, replacement=4), "mean values"),
        (dict(growth="delta_q", resolution=1.0, refine_steps=2), "k-means on keys"),
        (dict(growth="delta_q", resolution=1.0, select="query_head"), "per_head"),
        (dict(refresh=0), "refresh must be at least 1"),
        (dict(edge_stride=0), "edge_stride must be at least 1"),
        (dict(group_mean="merge"), "did you mean 'merged'"),
        (dict(group_mean="merged", aggregation="per_head"), "aggregation='query_group' or 'per_layer'"),
        (dict(levels=2, growth="nearest"), "growth='chunk'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    defaults = dict(replacement=0, refine_steps=0)
    with pytest.raises(ValueError, match=message):
        CommunityRetrieval(**(defaults | options))


@pytest.mark.parametrize("make", [ClusterRetrieval, CommunityQuota])
def test_a_seed_has_64_bits(make):
    assert make(seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(ValueError, match="seed must be less than 2"):
        make(seed=2**64)


def test_the_largest_seed_cuts_a_graph():
    edges = np.ones((6, 6)) - np.eye(6)
    assert leiden(csr_matrix(edges), 1.0, 2**64 - 1).labels.tolist() == [0] * 6
    assert kmeans(torch.randn(9, 2), 3, 1, 2**64 - 1).max() <= 2


def test_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match="resolution must be a number, or 'auto'"):
        CommunityRetrieval(resolution="fine")


def test_presets():
    paper = CommunityRetrieval.paper()
    assert (paper.top_k, paper.direct_weight, paper.resolution, paper.growth) == (8, 0.5, 1.0, "delta_q")
    assert CommunityRetrieval.recommended() == CommunityRetrieval()
    assert CommunityRetrieval.paper(top_k=16).top_k == 16
