"""Rotation factors of future positions, as complex numbers per frequency."""

import torch
from jaxtyping import Complex64, Int64
from torch import Tensor

from kvstitch.views import Rotary


def average_turn(rotary: Rotary, start: Int64[Tensor, "B"], count: int) -> Complex64[Tensor, "B F"]:
    """Mean of the RoPE factors `s exp(i w p)` over the `count` positions from `start` on (s = attention scaling).

    A geometric series: `s exp(i w (start + (count - 1) / 2)) sin(count w / 2) / (count sin(w / 2))`. Phases are float64:
    at position 20,000 float32 loses 5e-3 rad.
    """
    frequencies = rotary.inverse_frequencies.to(start.device, torch.float64)
    half = frequencies / 2
    # A frequency of zero does not turn, and the quotient would be 0 / 0.
    still = frequencies == 0
    length = torch.sin(count * half) / (count * torch.sin(half).masked_fill(still, 1.0))
    length = length.masked_fill(still, 1.0) * rotary.attention_scaling
    phase = (start.double()[:, None] + (count - 1) / 2) * frequencies
    # torch.polar wants a length that is not negative; a Dirichlet kernel is, now and then.
    return (torch.polar(torch.ones_like(phase), phase) * length).to(torch.complex64)


def turn_back(rotary: Rotary, positions: Int64[Tensor, "B W"]) -> Complex64[Tensor, "B W F"]:
    """Factors `exp(-i w p) / s` that undo the RoPE of vectors turned at `positions`."""
    phase = positions[..., None].double() * -rotary.inverse_frequencies.to(positions.device, torch.float64)
    return torch.polar(torch.full_like(phase, 1 / rotary.attention_scaling), phase).to(torch.complex64)


def turns(rotary: Rotary, start: Int64[Tensor, "B"], offsets: Int64[Tensor, "E"]) -> Complex64[Tensor, "B E F"]:
    """Factors `exp(i w (start + offset))` of unit length."""
    frequencies = rotary.inverse_frequencies.to(start.device, torch.float64)
    positions = (start[:, None] + offsets).double()
    phase = positions[..., None] * frequencies
    return torch.polar(torch.ones_like(phase), phase).to(torch.complex64)
