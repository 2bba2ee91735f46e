import math

import pytest
import torch

from kvstitch.views import Rotary


def by_hand(x, position, frequencies, scaling, interleaved):
    """One vector, one plane at a time, in float64."""
    half = len(frequencies)
    out = list(map(float, x))
    for f, w in enumerate(frequencies):
        a, b = (2 * f, 2 * f + 1) if interleaved else (f, f + half)
        c, s = scaling * math.cos(position * w), scaling * math.sin(position * w)
        out[a], out[b] = float(x[a]) * c - float(x[b]) * s, float(x[b]) * c + float(x[a]) * s
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_rotate_by_hand_and_back(interleaved, scaling):
    frequencies = [1.0, 0.3, 0.01]
    rotary = Rotary(torch.tensor(frequencies, dtype=torch.float64), scaling, interleaved)
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))  # dims 6 and 7 are not rotated
    positions = torch.tensor([[0, 5, 20000, 77], [3, 4, 5, 6]])
    turned = rotary.rotate(x, positions)
    for b in range(2):
        for h in range(3):
            for w in range(4):
                expected = by_hand(x[b, h, w], int(positions[b, w]), frequencies, scaling, interleaved)
                assert torch.allclose(turned[b, h, w], torch.tensor(expected), atol=1e-5)
    assert torch.allclose(rotary.unrotate(turned, positions), x, atol=1e-5)
    assert torch.allclose(rotary.from_complex(rotary.to_complex(x)), x[..., :6])


def test_the_logit_depends_on_the_distance_alone():
    rotary = Rotary(torch.tensor([1.0, 0.2], dtype=torch.float64))
    q, k = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(1))
    at = lambda x, p: rotary.rotate(x, torch.tensor([[p]]))
    logits = [float((at(q, p + 30) * at(k, p)).sum()) for p in (0, 7, 5000)]
    assert max(logits) - min(logits) < 1e-5
