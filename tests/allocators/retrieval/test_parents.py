"""Who is above whom: parents are neighbours, whoever has none is put with others, old and new ancestors go together."""

import torch

from kvstitch.allocators.retrieval.parents import BRANCHING, joined, sorted_by_parent


def test_regions_of_a_parent_are_neighbours(nested_labels):
    fine, middle, top = nested_labels(300, (40, 9, 3))
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


def test_a_narrow_top_has_few_nodes_in_every_row():
    """Nodes without a parent are put together until few are left; a row that has few already gets one root."""
    labels = torch.arange(900).view(1, 1, -1).repeat(2, 1, 1)
    labels[1, 0, 40:] = -1
    coarse = torch.where(labels < 0, -1, labels // 4)
    _, flat = sorted_by_parent(labels, [coarse])
    _, parents = sorted_by_parent(labels, [coarse], narrow_top=True)
    assert len(flat) == 1 and torch.equal(parents[0], flat[0])
    assert [int(level[0].max()) + 1 for level in parents] == [225, 15]
    assert [int(level[1].max()) + 1 for level in parents] == [10, 1]
    assert parents[1][0, 0].tolist() == [i // BRANCHING for i in range(225)]


def test_old_ancestors_stay_and_new_ones_come_behind():
    old = [torch.tensor([[[0, 0, 3, -1, -1]]]), torch.tensor([[[0, 0, 1, -1, -1]]])]
    new = [torch.tensor([[[-1, -1, -1, 0, 1]]])]
    first, second = joined(old, new)
    assert first.tolist() == [[[0, 0, 3, 4, 5]]] and second.tolist() == old[1].tolist()
    assert joined([], new) == new and joined(old, []) == old
