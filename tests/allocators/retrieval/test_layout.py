"""The order of storage in which regions are ranges."""

import pytest
import torch

from kvstitch.allocators.retrieval.layout import lay_out, without_gaps


def draw(*shape, high, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def test_labels_without_gaps():
    labels, numbers = without_gaps(torch.tensor([[[7, -1, 2, 7], [0, 0, -1, 5]]]))
    assert labels.tolist() == [[[1, -1, 0, 1], [0, 0, -1, 1]]]
    assert numbers[0, 0, 2] == 0 and numbers[0, 0, 7] == 1 and numbers[0, 1, 5] == 1 and numbers[0, 1, 2] == -1


@pytest.mark.parametrize("by_score", [False, True])
def test_layout_against_loops(by_score):
    """Empty slots, sinks, regions with their members in reading order, then everything after the boundary, unmoved."""
    batch, units, length, boundary = 2, 2, 30, 24
    pads = torch.tensor([0, 4])[:, None, None]
    positions = (torch.arange(length) - pads).clamp(min=-1).expand(batch, units, length)
    sinks = (positions >= 0) & (positions < 3)
    placed = (positions >= 3) & (torch.arange(length) < boundary)
    labels = torch.where(placed, draw(batch, units, length, high=5) * 3, -1)
    scores = torch.rand(batch, units, length, generator=torch.Generator().manual_seed(2)) if by_score else None
    layout = lay_out(labels, positions, sinks, placed, boundary, scores)
    for row in range(batch):
        for unit in range(units):
            order = layout.order[row, unit].tolist()
            assert sorted(order) == list(range(length))
            pad = int(pads[row])
            assert order[: pad + 3] == list(range(pad + 3)) and order[boundary:] == list(range(boundary, length))
            for region, (start, size) in enumerate(
                zip(layout.starts[row, unit].tolist(), layout.sizes[row, unit].tolist())
            ):
                members = [s for s in range(length) if layout.labels[row, unit, s] == region]
                key = (lambda s: -float(scores[row, unit, s])) if by_score else (lambda s: -s)
                assert order[start : start + size] == sorted(members, key=key)


def test_labels_after_the_boundary_count_as_regions_without_members():
    positions = torch.arange(6).view(1, 1, 6)
    labels = torch.tensor([[[-1, 4, 4, 9, 9, 6]]])
    placed = torch.tensor([[[False, True, True, True, False, False]]])
    layout = lay_out(labels, positions, positions < 1, placed, 4)
    assert layout.sizes.tolist() == [[[2, 0, 1]]] and layout.labels.tolist() == [[[-1, 0, 0, 2, 2, 1]]]
    assert layout.order[0, 0].tolist() == [0, 2, 1, 3, 4, 5]
