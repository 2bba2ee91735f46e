"""Nearest means against all distances in float64: any number of means, equal ones, blocks."""

import pytest
import torch

from kvstitch.allocators.retrieval import kmeans as module
from kvstitch.allocators.retrieval.kmeans import _nearest, refined


@pytest.mark.parametrize("rows", [64, 2**20])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_nearest_mean_is_that_of_all_distances(count, rows, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_NUMBERS", rows)
    draw = torch.Generator().manual_seed(count)
    keys, means = torch.randn(150, 8, generator=draw), torch.randn(count, 8, generator=draw)
    labels = _nearest(keys, means)
    distances = torch.cdist(keys.double(), means.double())
    assert torch.equal(labels, distances.argmin(dim=1)), "no two of these distances are within rounding"


def test_of_equal_means_the_lowest_is_taken():
    means = torch.arange(40.0)[:, None].expand(40, 3).clone()
    means[35] = means[2]
    means[20] = means[2]
    assert _nearest(means[2:3] + 0.1, means).tolist() == [2]
    means[2] = -100
    assert _nearest(means[35:36] + 0.1, means).tolist() == [20]


def test_steps_are_lloyds_in_loops():
    """Means of the members, then the nearest mean, as often as asked; an empty cluster stays where it was."""
    draw = torch.Generator().manual_seed(3)
    keys, labels = torch.randn(90, 4, generator=draw), torch.arange(90) % 40
    found = refined(keys, labels, 3, seed=5)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(5)).tolist()
    means = [keys[next(i for i in order if i % 40 == c)].double() for c in range(40)]
    for step in range(4):
        nearest = [min(range(40), key=lambda c: float((key - means[c]).square().sum())) for key in keys.double()]
        for cluster in range(40 if step < 3 else 0):
            members = [i for i in range(90) if nearest[i] == cluster]
            if members:
                means[cluster] = keys[members].double().mean(0)
    assert found.tolist() == nearest
