"""A tree over regions: parents are neighbours, candidates are what lies below the best, and nothing is lost if all fit."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvstitch.allocators.retrieval import CommunityRetrieval, ReadPlan
from kvstitch.allocators.retrieval.growth import ChunkGrowth
from kvstitch.allocators.retrieval.region_index import RegionOptions
from kvstitch.allocators.retrieval.tree import RegionTree, score_columns

SINKS, RECENT = 3, 5


@pytest.mark.parametrize("combine", ["mean", "max", "softmax_sum"])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_tree_that_fits_reads_what_the_list_reads(
    make_layer, given_regions, chunk_growth, read_plan, nested_labels, combine, levels
):
    fine, *coarse = nested_labels(80, (18, 6, 2))
    reads = []
    for tree in ([], coarse[:levels]):
        layer = make_layer()
        index = given_regions(layer.frame(SINKS), RegionOptions(combine=combine), chunk_growth(), fine, tree)
        layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
        positions = []
        for _ in range(9):
            layer.append()
            slots = index.select(layer.step()).slots
            positions.append(layer.positions.gather(2, slots).sort(dim=-1).values)
        reads.append(torch.stack(positions))
    assert index._tree is not None and torch.equal(*reads)


def test_a_tree_reads_a_part_of_the_index_and_the_best_parents_children(
    make_layer, given_regions, chunk_growth, read_plan
):
    length = 3000
    layer = make_layer(batch=1, length=length, padding=(0,), dim=16)
    group = torch.arange(length + 40) // 4
    centres = torch.randn(64, 16, generator=layer.draw)
    layer.all_keys += 3 * centres[(group // 16 % 64)][None, None]
    index = given_regions(
        layer.frame(SINKS),
        RegionOptions(replacement=3),
        chunk_growth(),
        group.view(1, 1, -1),
        [(group // 16).view(1, 1, -1)],
    )
    layer.permute(index.build(layer.view(), read_plan(40, SINKS, RECENT, batch=1)))
    layer.append()
    reads = index.select(layer.step())
    assert reads.index_rows < index.store.num / 3
    store = index.store
    for head in range(2):
        query = layer.query(0, head).mean(0)
        scores = query @ store.vectors[0, head].double()
        best = scores.masked_fill(store.bias[0, head] < 0, -torch.inf).topk(4).indices.tolist()
        read = set(reads.slots[0, head].tolist())
        for region in best:
            start, size = int(store.starts[0, head, region]), int(store.sizes[0, head, region])
            assert set(range(start, start + size)) <= read


def leaves_below(tree, store, row, unit):
    """Columns under each node of each level, nearest level first, and all that a search from the top can reach."""
    below = [[{column} for column in range(store.num)]]
    for level in tree._levels:
        spans = zip(level.first[row, unit].tolist(), level.count[row, unit].tolist())
        below.append([set().union(*below[-1][first : first + count]) for first, count in spans])
    reached = set().union(*below[-1])
    for up in range(len(tree._levels)):
        first, last = tree._waiting(up, store)
        reached |= set().union(*below[up][first:last])
    return below[1:], reached


def by_sixteens(length, tokens, levels):
    """Labels of nested runs, the finest of `tokens` each."""
    fine = torch.arange(length) // tokens
    return [(fine // 16**up).view(1, 1, -1) for up in range(levels + 1)]


@pytest.mark.parametrize("grows_higher", [False, True])
@pytest.mark.parametrize("select", ["kv_head", "query_head"])
def test_a_row_finds_what_it_would_alone(make_layer, given_regions, grows_higher, select):
    """Many small regions beside few large ones, budgets of their own, another depth, growth, and a build in between."""
    both = make_layer(length=1500, padding=(0, 700), most=120)
    labels = [by_sixteens(1620, tokens, 3) for tokens in (2, 9)]
    fine, *coarse = (torch.cat(level) for level in zip(*labels))
    options = RegionOptions(combine="max", select=select, grows_higher=grows_higher, new_tokens=1)
    alone, budgets, indices = [both.alone(row) for row in range(2)], (90, 24), []
    for layer, rows in ((both, slice(0, 2)), (alone[0], slice(0, 1)), (alone[1], slice(1, 2))):
        tables = fine[rows], [level[rows] for level in coarse]
        indices.append(given_regions(layer.frame(SINKS), options, ChunkGrowth(1), *tables))
    narrowed = [False, False]
    for number in range(96):
        if number in (0, 40):
            for index, layer, rows in zip(indices, (both, *alone), (budgets, budgets[:1], budgets[1:])):
                layer.permute(index.build(layer.view(), ReadPlan(rows, SINKS, RECENT)))
                # The second build finds no new levels.
                index._coarse_by_position = ()
        found = []
        for index, layer in zip(indices, (both, *alone)):
            layer.append()
            slots = index.select(layer.step()).slots
            by_selection = layer.positions.repeat_interleave(slots.shape[1] // 2, dim=1)
            found.append(by_selection.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, -1))
        for row in range(2):
            for of_both, own in zip(found[0][row].tolist(), found[row + 1][0].tolist()):
                assert set(of_both) - {-1} == set(own) - {-1}, (number, row)
            own = indices[row + 1]
            narrowed[row] |= own._tree.num_rows(own.store) < own.store.num
    assert all(narrowed) and all(index._tree is not None for index in indices)


@pytest.mark.parametrize("select", ["kv_head", "query_head"])
def test_all_that_a_search_looks_at_is_charged(make_layer, given_regions, monkeypatch, select):
    """Nodes of all levels, regions, and those that opened later, for each selection of a head."""
    seen = []
    for module in ("tree", "region_index"):
        monkeypatch.setattr(
            f"kvstitch.allocators.retrieval.{module}.score_columns",
            lambda vectors, bias, ids, rows: seen.append(ids.shape[1:]) or score_columns(vectors, bias, ids, rows),
        )
    layer = make_layer(length=600, padding=(0, 0), most=90)
    fine, *coarse = by_sixteens(690, 2, 2)
    options = RegionOptions(select=select, replacement=3, grows_higher=True, new_tokens=1)
    index = given_regions(layer.frame(SINKS), options, ChunkGrowth(1), fine, coarse)
    layer.permute(index.build(layer.view(), ReadPlan((30, 30), SINKS, RECENT)))
    for _ in range(80):
        layer.append()
        seen.clear()
        reads = index.select(layer.step())
        looked_at = sum(selections * columns for selections, columns in seen) // 2
        assert reads.index_rows == looked_at + 3 * (3 if select == "query_head" else 1)


def test_a_search_looks_at_a_number_of_nodes_that_grows_with_the_log(
    make_layer, given_regions, chunk_growth, read_plan
):
    """Sixteen times the regions are one level more, and a level costs the same whatever stands on it."""
    rows, depths = [], []
    for regions in (2**8, 2**12, 2**16):
        layer = make_layer(batch=1, heads=1, length=regions, padding=(0,), dim=2)
        fine, *coarse = by_sixteens(regions + 40, 1, 6)
        index = given_regions(layer.frame(SINKS), RegionOptions(grows_higher=True), chunk_growth(), fine, coarse)
        layer.permute(index.build(layer.view(), read_plan(20, SINKS, RECENT, batch=1)))
        layer.append()
        rows.append(index.select(layer.step()).index_rows)
        depths.append(len(index._tree._levels))
    assert depths == [1, 2, 3]
    assert rows[2] - rows[1] <= 32 and rows[1] - rows[0] <= 80 and rows[2] < 180
    # With a fixed number of levels it grows as the regions do.
    fixed = given_regions(layer.frame(SINKS), RegionOptions(), chunk_growth(), fine, coarse[:1])
    layer = make_layer(batch=1, heads=1, length=2**16, padding=(0,), dim=2)
    layer.permute(fixed.build(layer.view(), read_plan(20, SINKS, RECENT, batch=1)))
    layer.append()
    assert fixed.select(layer.step()).index_rows > 2**16 / 16


class Syncs(TorchDispatchMode):
    """Operators that wait for a device."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.equal")):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grows_higher", [False, True])
def test_a_tree_grows_with_the_text(make_layer, given_regions, monkeypatch, grows_higher):
    """Regions that open later get parents that are their means; all stay in reach, and a search does not grow."""
    syncs, take_in = Syncs(), RegionTree.take_in

    def watched(tree, store):
        with syncs:
            take_in(tree, store)

    monkeypatch.setattr(RegionTree, "take_in", watched)
    layer = make_layer(batch=2, heads=1, group=1, length=60, padding=(0, 9), dim=4, most=700)
    fine, *coarse = by_sixteens(760, 2, 2)
    options = RegionOptions(grows_higher=grows_higher, new_tokens=1)
    index = given_regions(layer.frame(SINKS), options, ChunkGrowth(1), fine, coarse if grows_higher else coarse[:1])
    layer.permute(index.build(layer.view(), ReadPlan((16, 16), SINKS, RECENT)))
    rows = []
    for _ in range(650):
        layer.append()
        rows.append(index.select(layer.step()).index_rows)
    tree, store = index._tree, index.store
    below, reached = leaves_below(tree, store, 0, 0)
    assert reached == set(range(store.num)) and store.num > 600
    for level, nodes in zip(tree._levels, below):
        for node, columns in enumerate(nodes):
            columns = [c for c in columns if store.counts[0, 0, c]]
            weights = store.counts[0, 0, columns].double()
            mean = (store.vectors[0, 0][:, columns].double() * weights).sum(-1) / weights.sum()
            assert torch.allclose(level.rows[0, 0, node].double(), mean, atol=1e-5)
    if grows_higher:
        assert len(tree._levels) == 2 and len(below[-1]) <= 2 * 16
        assert max(rows[300:]) < max(rows[:300]) + 60
    else:
        assert len(tree._levels) == 1 and tree._levels[0].num > 600 / 16
    assert not syncs.names


@pytest.mark.parametrize("levels", [2, "auto"])
def test_a_build_without_new_edges_keeps_the_tree(make_layer, read_plan, levels):
    """Another budget, or another turn: what was above a region is above it still."""
    layer = make_layer(length=500, padding=(0, 40), most=80)
    allocator = CommunityRetrieval(
        top_k=3, resolution=60.0, min_mean_tokens=1, refine_steps=0, replacement=0, edge_stride=1, levels=levels,
        growth_tokens=1,
    )  # fmt: skip
    index = allocator.start(layer.frame(SINKS))
    view = layer.view()
    index.observe(layer.queries[:, :, :500], view.keys, view.positions, True)
    layer.permute(index.build(view, read_plan(26, SINKS, RECENT)))

    def nodes():
        """The tokens below each node of each level, of one row and head."""
        store, found = index.store, []
        for level in leaves_below(index._tree, store, 1, 1)[0]:
            slots = [
                {p for c in node for p in range(int(store.starts[1, 1, c]), int((store.starts + store.sizes)[1, 1, c]))}
                for node in level
            ]
            found.append({frozenset(layer.positions[1, 1, list(node)].tolist()) for node in slots if node})
        return found

    first = nodes()
    for budget in (26, 40):
        layer.permute(index.build(layer.view(), read_plan(budget, SINKS, RECENT)))
        assert nodes() == first
    layer.append()
    reads = index.select(layer.step())
    assert reads.index_rows < index.store.num and (reads.slots >= 0).all()
    for _ in range(60):
        layer.append()
        index.select(layer.step())
    grown = nodes()
    layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
    assert all(before <= after for before, after in zip(grown, nodes())) and len(grown[0]) > len(first[0])
