"""A tree over regions: parents are neighbours, candidates are what lies below the best, and nothing is lost if all fit."""

import pytest
import torch

from kvstitch.allocators.retrieval.region_index import RegionOptions
from kvstitch.allocators.retrieval.tree import sorted_by_parent

SINKS, RECENT = 3, 5


def nested(length, sizes, seed=0):
    """Labels of nested partitions, finest first."""
    draw = torch.Generator().manual_seed(seed)
    fine = torch.randint(0, sizes[0], (1, 1, length), generator=draw)
    levels = [fine]
    for size in sizes[1:]:
        parents = torch.randint(0, size, (int(levels[-1].max()) + 1,), generator=draw)
        levels.append(parents[levels[-1]])
    return levels


def test_regions_of_a_parent_are_neighbours():
    fine, middle, top = nested(300, (40, 9, 3))
    labels, parents = sorted_by_parent(fine, [middle, top])
    for slot in range(300):
        region = int(labels[0, 0, slot])
        group = [s for s in range(300) if int(parents[0][0, 0, labels[0, 0, s]]) == int(parents[0][0, 0, region])]
        assert len({int(middle[0, 0, s]) for s in group}) == 1
    for parent in parents:
        used = [p for p in parent[0, 0].tolist() if p >= 0]
        assert used == sorted(used) and set(used) == set(range(max(used) + 1))
    assert len(set(parents[0][0, 0].tolist())) == len(middle.unique())
    assert len(set(parents[1][0, 0].tolist())) == len(top.unique())


def test_regions_without_a_parent_are_put_together():
    labels = torch.arange(40).view(1, 1, 40)
    coarse = torch.where(labels < 6, labels // 3, -1)
    _, parents = sorted_by_parent(labels, [coarse])
    assert parents[0][0, 0].tolist() == [0] * 3 + [1] * 3 + [2] * 16 + [3] * 16 + [4] * 2


@pytest.mark.parametrize("combine", ["mean", "max", "softmax_sum"])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_tree_that_fits_reads_what_the_list_reads(
    make_layer, given_regions, chunk_growth, read_plan, combine, levels
):
    fine, *coarse = nested(80, (18, 6, 2))
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
