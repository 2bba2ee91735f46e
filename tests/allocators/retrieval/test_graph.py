"""The attention graph against its formula in loops, whole and in chunks, with padding, and by aggregation."""

import numpy as np
import pytest
import torch

from kvstitch.allocators.retrieval import DecodeStep
from kvstitch.allocators.retrieval.graph import EdgeStore, NewEdges, attention_graph
from kvstitch.kernels.topk_attention.api import topk_edges


def dense_graph(attention, direct):
    """The paper's formula over a dense top-k matrix, in loops."""
    count = len(attention)
    graph = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            if i != j:
                graph[i, j] = direct / 2 * (attention[i, j] + attention[j, i])
                graph[i, j] += (1 - direct) * sum(attention[m, i] * attention[m, j] for m in range(count))
    return graph


@pytest.mark.parametrize("direct", [0.0, 0.5, 1.0])
def test_a_query_that_stands_for_several_counts_as_if_they_were_all_there(direct):
    """Queries 10 to 15 with three copies of each among 10 keys that are no queries: two graphs, the same among the keys."""
    draw = np.random.default_rng(1)
    attention = draw.random((6, 10)) * (draw.random((6, 10)) < 0.5)
    query, key = attention.nonzero()
    weight, times = attention[query, key], np.array([1, 3, 3, 1, 3, 3])
    few = attention_graph(10 + query, key, weight, 28, direct, times[query].astype(float))
    copies = [
        (10 + int(times[:q].sum()) + copy, k, w) for q, k, w in zip(query, key, weight) for copy in range(times[q])
    ]
    many = attention_graph(*(np.array(column) for column in zip(*copies)), 28, direct)
    assert np.abs((few - many)[:10, :10]).max() < 1e-12 and (few != few.T).nnz == 0
    degrees = [np.asarray(graph.sum(axis=1)).ravel()[:10] for graph in (few, many)]
    assert np.abs(degrees[0] - degrees[1]).max() < 1e-12 and degrees[0].any()


@pytest.mark.parametrize("direct", [0.0, 0.5, 1.0])
def test_graph_is_the_formula(direct):
    draw = np.random.default_rng(0)
    attention = np.tril(draw.random((12, 12))) * (draw.random((12, 12)) < 0.4)
    query, key = attention.nonzero()
    graph = attention_graph(query, key, attention[query, key], 12, direct)
    assert np.abs(graph.toarray() - dense_graph(attention, direct)).max() < 1e-12
    assert (graph != graph.T).nnz == 0 and graph.has_sorted_indices and not graph.diagonal().any()


def test_graph_by_hand():
    """Query 2 attends 0 and 1 with .6 and .3; query 3 attends 1 with .5."""
    graph = attention_graph(np.array([2, 2, 3]), np.array([0, 1, 1]), np.array([0.6, 0.3, 0.5]), 4, 0.5).toarray()
    assert graph[0, 1] == pytest.approx(0.5 * 0.18) and graph[0, 2] == pytest.approx(0.25 * 0.6)
    assert graph[1, 3] == pytest.approx(0.25 * 0.5) and graph[2, 3] == 0


def layer(batch=1, heads=2, group=2, length=40, dim=8, pad=0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads * group, length, dim, generator=draw) * 2
    keys = torch.randn(batch, heads, length, dim, generator=draw)
    positions = (torch.arange(length) - pad).clamp(min=-1).expand(batch, heads, length)
    return query, keys, positions


def weights_of(query, keys, pad, sinks, aggregation):
    """Dense attention `[U, N, N]` of one row without its padding, sinks set to zero."""
    heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
    rows = query[0, :, pad:].double()
    columns = keys[0, :, pad:].double().repeat_interleave(group, 0)
    logits = rows @ columns.transpose(1, 2) * 0.3
    future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, -torch.inf).softmax(-1)
    if aggregation != "per_head":
        weights = weights.view(heads, group, *weights.shape[1:]).mean(1)
    weights[:, :, :sinks] = 0
    return weights


@pytest.mark.parametrize("aggregation", ["query_group", "per_head", "per_layer"])
@pytest.mark.parametrize("pieces", [[40], [17, 15, 8]])
@pytest.mark.parametrize("pad", [0, 6])
def test_edges_are_the_largest_weights(aggregation, pieces, pad):
    query, keys, positions = layer(pad=pad)
    store, start = EdgeStore(3, 2, aggregation), 0
    for size in pieces:
        chunk, seen = query[:, :, start : start + size], slice(0, start + size)
        store.observe(chunk, keys[:, :, seen], positions[:, :, seen], pad > 0, 0.3, None, None)
        start += size
    weights = weights_of(query, keys, pad, 2, aggregation)
    assert store.num_graphs == {"query_group": 2, "per_head": 4, "per_layer": 1}[aggregation]
    for graph in range(store.num_graphs):
        sources, targets, values, _, seen = store.of(0, graph).arrays()
        assert sorted(seen.tolist()) == list(range(40 - pad))
        found = np.zeros((40 - pad, 40 - pad))
        np.add.at(found, (sources, targets), values)
        expected = np.zeros_like(found)
        parts = weights if aggregation == "per_layer" else weights[graph : graph + 1]
        for part in parts.numpy() / len(parts):
            for i, row in enumerate(part):
                for j in sorted(range(len(row)), key=lambda j: -row[j])[:3]:
                    expected[i, j] += row[j]
        assert np.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("pieces", [[40], [17, 15, 8]])
@pytest.mark.parametrize("pad", [0, 6])
def test_a_stride_keeps_the_edges_of_some_tokens(pieces, pad):
    """Those of tokens 3, 6, 9, …, each for three, whatever the chunks and the padding; all are nodes."""
    query, keys, positions = layer(pad=pad)
    every, some = EdgeStore(3, 2, "query_group"), EdgeStore(3, 2, "query_group", stride=3)
    for store, sizes in ((every, [40]), (some, pieces)):
        start = 0
        for size in sizes:
            chunk, seen = query[:, :, start : start + size], slice(0, start + size)
            store.observe(chunk, keys[:, :, seen], positions[:, :, seen], pad > 0, 0.3, None, None)
            start += size
    for graph in range(2):
        sources, targets, values, repeats, _ = every.of(0, graph).arrays()
        third = (sources + 1) % 3 == 0
        expected = dict(zip(zip(sources[third], targets[third]), values[third]))
        assert (repeats == 1).all()
        sources, targets, values, repeats, seen = some.of(0, graph).arrays()
        assert dict(zip(zip(sources, targets), values)) == pytest.approx(expected, rel=1e-5) and (repeats == 3).all()
        assert sorted(seen.tolist()) == list(range(40 - pad))


def test_merged_heads_leave_merged_edges():
    query, keys, positions = layer()
    stores = {name: EdgeStore(3, 2, "query_group", name) for name in ("exact", "merged")}
    for store in stores.values():
        store.observe(query, keys, positions, False, 0.3, None, None)
    expected = topk_edges(query, keys, 0.3, 3, 2, group_mean="merged")
    for graph in range(2):
        _, targets, values, *_ = stores["merged"].of(0, graph).arrays()
        listed = expected.indices[0, graph] >= 0
        assert targets.tolist() == expected.indices[0, graph][listed].tolist()
        assert values == pytest.approx(expected.weights[0, graph][listed].numpy())
        assert values.sum() < stores["exact"].of(0, graph).arrays()[2].sum()


def test_edges_follow_a_permuted_storage():
    """A later chunk over slots in another order gives edges between the same positions."""
    query, keys, positions = layer(length=30)
    order = torch.cat((torch.randperm(20, generator=torch.Generator().manual_seed(1)), torch.arange(20, 30)))
    plain, permuted = EdgeStore(3, 0, "query_group"), EdgeStore(3, 0, "query_group")
    plain.observe(query[:, :, 20:], keys, positions, False, 0.3, None, None)
    permuted.observe(query[:, :, 20:], keys[:, :, order], positions[:, :, order], False, 0.3, None, None)
    for graph in range(2):
        one, other = (
            dict(zip(zip(*e[:2]), e[2])) for e in (plain.of(0, graph).arrays(), permuted.of(0, graph).arrays())
        )
        assert one.keys() == other.keys() and all(abs(one[k] - other[k]) < 1e-6 for k in one)


def test_edges_of_decoded_tokens_join_those_of_the_prompt():
    query, keys, positions = layer(length=30)
    store = EdgeStore(2, 0, "query_group")
    new = NewEdges(4, torch.zeros(1, 2, 2))
    step = DecodeStep(query[:, :, -1:], keys, keys, positions.int())
    slots = torch.tensor([[[5, -1], [29, 0]]], dtype=torch.int32)
    new.append(step, torch.tensor([[[0.5, 0.0], [0.3, 0.2]]]), slots)
    new.move_to(store)
    assert [x.tolist() for x in store.of(0, 0).arrays()[:3]] == [[29], [5], [0.5]]
    assert store.of(0, 1).arrays()[1].tolist() == [29, 0]
    new.move_to(store)
    assert store.of(0, 1).arrays()[1].tolist() == [29, 0]


def test_memory_is_linear_in_the_tokens():
    sizes = []
    for length in (64, 128):
        query, keys, positions = layer(length=length)
        store = EdgeStore(3, 0, "query_group")
        store.observe(query, keys, positions, False, 0.3, None, None)
        sizes.append(store.stored_bytes)
    assert sizes[1] == 2 * sizes[0]
