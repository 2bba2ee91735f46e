"""From a prompt to communities: in one piece or in chunks, in later turns, refreshed, and told to whoever watches."""

import numpy as np
import pytest
import torch

from kvstitch.allocators.retrieval import CommunityRetrieval, ReadPlan
from kvstitch.allocators.retrieval.community_index import CommunityIndex
from kvstitch.allocators.retrieval.graph import attention_graph
from kvstitch.allocators.retrieval.partition import leiden

SINKS, RECENT = 3, 5
PLAIN = dict(refine_steps=0, replacement=0, combine="mean", edge_stride=1)


def observed(layer, allocator, pieces, has_empty=True):
    index = allocator.start(layer.frame(SINKS))
    view, start = layer.view(), 0
    for size in pieces:
        seen = slice(0, start + size)
        index.observe(
            layer.queries[:, :, start : start + size], view.keys[:, :, seen], view.positions[:, :, seen], has_empty
        )
        start += size
    return index


def regions_of(layer, index, row, unit):
    """Frozen sets of positions."""
    labels = index.known_labels(layer.length)
    head = unit * layer.heads // labels.shape[1]
    found = {}
    for slot in range(layer.length):
        label = int(labels[row, unit, slot])
        if label >= 0:
            found.setdefault(label, set()).add(int(layer.positions[row, head, slot]))
    return set(map(frozenset, found.values()))


def test_labels_are_leidens(make_layer, read_plan):
    """Edges, graph and Leiden put together by hand give the regions of the index."""
    layer = make_layer(padding=(0, 0))
    options = CommunityRetrieval(**PLAIN, top_k=3, direct_weight=0.5, resolution=2.0, min_mean_tokens=1, run_tokens=1)
    index = observed(layer, options, [70], has_empty=False)
    before = layer.view()
    layer.permute(index.build(before, read_plan(26, SINKS, RECENT)))
    for row in range(2):
        for head in range(2):
            keys = before.keys[row, head].double()
            queries = layer.queries[row, 3 * head : 3 * head + 3, :70].double()
            logits = (queries @ keys.T * layer.scaling).masked_fill(
                torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf
            )
            weights = logits.softmax(-1).mean(0)
            weights[:, :SINKS] = 0
            top = weights[SINKS:].topk(3)
            query = np.repeat(np.arange(70 - SINKS), 3)
            key = top.indices.flatten().numpy() - SINKS
            value = top.values.flatten().numpy().round(6)
            real = value > 0
            graph = attention_graph(query[real], key[real], value[real], 70 - SINKS, 0.5)
            labels = leiden(graph, 2.0, 0).labels
            body = range(SINKS, 70 - RECENT)
            expected = {frozenset(p for p in body if labels[p - SINKS] == c) for c in set(labels.tolist())} - {
                frozenset()
            }
            assert regions_of(layer, index, row, head) == expected


@pytest.mark.parametrize("aggregation", ["query_group", "per_head", "per_layer"])
def test_chunks_give_what_the_whole_gives(make_layer, read_plan, aggregation):
    results = []
    for pieces in ([70], [20, 33, 17]):
        layer = make_layer()
        index = observed(layer, CommunityRetrieval(**PLAIN, top_k=3, aggregation=aggregation), pieces)
        layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
        units = index.store.starts.shape[1]
        assert units == (6 if aggregation == "per_head" else 2)
        results.append([regions_of(layer, index, row, unit) for row in range(2) for unit in range(units)])
    assert results[0] == results[1]
    if aggregation == "per_layer":
        assert results[0][0] == results[0][1]


@pytest.mark.parametrize("options", [dict(), dict(partition="kmeans"), dict(partition="random"), dict(refine_steps=3)])
def test_every_token_of_the_body_is_in_one_region(make_layer, read_plan, options):
    layer = make_layer()
    index = observed(layer, CommunityRetrieval(**(PLAIN | dict(top_k=3) | options)), [70])
    layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
    for row, length in enumerate((70, 61)):
        for head in range(2):
            regions = regions_of(layer, index, row, head)
            assert sorted(p for region in regions for p in region) == list(range(SINKS, length - RECENT))


def test_rows_do_not_depend_on_each_other_nor_on_padding(make_layer, read_plan):
    both, alone = make_layer(), make_layer()
    for name in ("all_keys", "all_values", "queries"):
        setattr(alone, name, getattr(alone, name)[1:, :, 9:])
    alone.all_positions = alone.all_positions[1:, 9:]
    alone.slots, alone.batch = alone.slots[1:, :, :61], 1
    options = CommunityRetrieval(**PLAIN, top_k=3)
    found = []
    for layer, row, length, batch in ((both, 1, 70, 2), (alone, 0, 61, 1)):
        index = observed(layer, options, [length])
        layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT, batch=batch)))
        found.append([regions_of(layer, index, row, head) for head in range(2)])
    assert found[0] == found[1]


def test_a_later_turn_leaves_old_communities_alone(make_layer, read_plan):
    layer = make_layer(padding=(0, 0), most=60)
    index = observed(layer, CommunityRetrieval(**PLAIN, top_k=3, growth_tokens=4), [70], has_empty=False)
    plan = read_plan(26, SINKS, RECENT)
    layer.permute(index.build(layer.view(), plan))
    before = [regions_of(layer, index, 0, head) for head in range(2)]
    for _ in range(9):
        layer.append()
        index.select(layer.step())
    for _ in range(20):
        layer.append()
    view = layer.view()
    index.observe(layer.queries[:, :, 79:99], view.keys, view.positions, False)
    layer.permute(index.build(view, plan))
    for head in range(2):
        after = regions_of(layer, index, 0, head)
        assert before[head] <= after
        new = sorted(p for region in after - before[head] for p in region)
        assert new == list(range(65, 99 - RECENT))
        assert frozenset(range(65, 69)) in after, "tokens that were decoded keep their chunk"


def test_a_refresh_partitions_everything_again(make_layer, read_plan, monkeypatch):
    """Old and decoded tokens are nodes of one graph; the snapshot is taken when due and used a window later."""
    layer = make_layer(padding=(0, 0), most=60)
    cut, found = CommunityIndex._cut, []
    monkeypatch.setattr(CommunityIndex, "_cut", lambda self, edges: found.append(cut(self, edges)) or found[-1])
    index = observed(layer, CommunityRetrieval(**PLAIN, top_k=3, refresh=8), [70], has_empty=False)
    plan = read_plan(26, SINKS, RECENT)
    layer.permute(index.build(layer.view(), plan))
    assert index.update_top_k == 3
    due_at = []
    for step_number in range(1, 20):
        if index.due(layer.length):
            due_at.append(step_number)
            layer.permute(index.build(layer.view(), plan))
            break
        layer.append()
        step = layer.step()
        reads = index.select(step)
        slots = reads.slots[..., SINKS:][..., [0, 4, 9]].int()
        index.update(step, torch.full((2, 2, 3), 0.2), slots)
    assert due_at == [8 + RECENT + 1]
    assert len(found) == 8
    # All tokens up to the snapshot were nodes, the decoded ones among them.
    assert all((result.labels[SINKS:78] >= 0).all() for result in found[4:])
    assert index.describe()["modularity"].tolist() == pytest.approx([result.modularity for result in found[4:]])
    regions = regions_of(layer, index, 0, 0)
    assert sorted(p for region in regions for p in region) == list(range(SINKS, layer.length - RECENT))


def test_what_is_shown(make_layer, read_plan):
    layer = make_layer(padding=(0, 0))
    index = observed(layer, CommunityRetrieval(**PLAIN, top_k=3, resolution=2.0), [70], has_empty=False)
    assert index.describe() == {}
    layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
    shown = index.describe()
    assert shown["sizes"].sum(-1).eq(70 - SINKS - RECENT).all()
    assert shown["resolution"].tolist() == [2.0] * 4 and shown["modularity"].shape == (4,)
    assert (shown["num_leiden"] >= 1).all()


def test_edges_are_given_back_unless_they_are_needed_again(make_layer, read_plan):
    kept = []
    for refresh in (None, 50):
        layer = make_layer(padding=(0, 0))
        index = observed(layer, CommunityRetrieval(**PLAIN, top_k=3, refresh=refresh), [70], has_empty=False)
        layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
        kept.append(index._edges.stored_bytes)
    assert kept[0] == 0 and kept[1] > 0


def test_more_edges_than_neighbours_are_refused():
    allocator = CommunityRetrieval(**PLAIN, top_k=70)
    with pytest.raises(ValueError, match="top_k must be less than the 67 tokens of the prompt that can be neighbours"):
        allocator.check_prompt(70, SINKS)
    allocator.check_prompt(74, SINKS)


def test_budgets_of_rows_reach_the_reads(make_layer):
    layer = make_layer()
    index = observed(layer, CommunityRetrieval(**PLAIN, top_k=3), [70])
    layer.permute(index.build(layer.view(), ReadPlan((30, 20), SINKS, RECENT)))
    layer.append()
    reads = index.select(layer.step())
    assert (reads.slots >= 0).sum(-1).tolist() == [[30, 30], [20, 20]]
