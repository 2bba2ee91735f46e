"""Ranges of slots read one after another, against loops and by hand."""

import pytest
import torch

from kvstitch.kernels.common.ranges import expand_ranges, unit_steps


def draw(*shape, high, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 7, 40])
def test_ranges_one_after_another(width):
    starts, sizes = draw(2, 3, 9, high=500), draw(2, 3, 9, high=6, seed=1)
    out = expand_ranges(starts, sizes, sizes.cumsum(-1), unit_steps(width, starts.device))
    assert out.shape == (2, 3, width + 1)
    for row in range(2):
        for unit in range(3):
            wanted = [s + i for s, n in zip(starts[row, unit].tolist(), sizes[row, unit].tolist()) for i in range(n)]
            count = min(width, len(wanted))
            assert out[row, unit, :count].tolist() == wanted[:count]


def test_empty_ranges_between_others_by_hand():
    starts, sizes = torch.tensor([[[9, 50, 3, 70]]]), torch.tensor([[[2, 0, 3, 0]]])
    out = expand_ranges(starts, sizes, sizes.cumsum(-1), unit_steps(5, starts.device))
    assert out[0, 0, :5].tolist() == [9, 10, 3, 4, 5]
