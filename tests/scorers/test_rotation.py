import pytest
import torch

from kvstitch.scorers.rotation import average_turn, turn_back, turns
from kvstitch.views import Rotary

# From a full turn in 6 tokens over slow ones to one that stands still.
FREQUENCIES = torch.tensor([1.0, 0.3, 1e-3, 1e-9, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 512])
@pytest.mark.parametrize("start", [0, 7, 131_072])
def test_average_turn_is_the_mean_of_the_turns(start, count):
    rotary = Rotary(FREQUENCIES, attention_scaling=1.2)
    positions = torch.arange(start, start + count, dtype=torch.float64)
    expected = 1.2 * torch.exp(1j * positions[:, None] * FREQUENCIES).mean(0)
    actual = average_turn(rotary, torch.tensor([start]), count)
    torch.testing.assert_close(actual[0], expected.to(torch.complex64), rtol=1e-5, atol=1e-6)


def test_rows_turn_from_their_own_start():
    rotary = Rotary(FREQUENCIES)
    together = average_turn(rotary, torch.tensor([3, 90]), 16)
    assert torch.equal(together[1:], average_turn(rotary, torch.tensor([90]), 16))


def test_turns_by_hand():
    rotary = Rotary(torch.tensor([torch.pi / 2, 0.0], dtype=torch.float64), attention_scaling=3.0)
    actual = turns(rotary, torch.tensor([1]), torch.tensor([0, 1, 3]))
    expected = torch.tensor([[[1j, 1], [-1, 1], [1, 1]]], dtype=torch.complex64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_turning_back_undoes_the_rope_of_the_model():
    rotary = Rotary(FREQUENCIES, attention_scaling=1.3)
    x, positions = torch.randn(2, 3, 4, 10), torch.tensor([[0, 1, 50, 4000], [7, 8, 9, 10]])
    turned = rotary.to_complex(rotary.rotate(x, positions)) * turn_back(rotary, positions)[:, None]
    torch.testing.assert_close(turned, rotary.to_complex(x), rtol=1e-5, atol=1e-5)
