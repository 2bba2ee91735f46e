"""Rotary position embedding as the live model applies it (RoFormer, arXiv 2104.09864)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Turns vectors to a position, or back, with the model's own frequencies.

    Args:
        inverse_frequencies: `[F]` float64, radians per token; the first `2 F` dims of a head are rotated.
        attention_scaling: factor that the model puts on cos and sin (1 unless YaRN-like).
        interleaved: False pairs dim f with f + F (Llama), True pairs 2f with 2f + 1 (GPT-J, GLM).
    """

    inverse_frequencies: Float[Tensor, "F"]
    attention_scaling: float = 1.0
    interleaved: bool = False

    @property
    def rotated_dims(self) -> int:
        return 2 * self.inverse_frequencies.shape[0]

    def rotate(self, x: Float[Tensor, "B H W D"], positions: Int64[Tensor, "B W"]) -> Float[Tensor, "B H W D"]:
        """`x` as the model would rotate it at `positions`, its scaling included; dims past `2 F` pass through."""
        return self._turn(x, positions.double(), self.attention_scaling)

    def unrotate(self, x: Float[Tensor, "B H W D"], positions: Int64[Tensor, "B W"]) -> Float[Tensor, "B H W D"]:
        """The vector that `rotate` would turn into `x` at `positions`."""
        return self._turn(x, -positions.double(), 1.0 / self.attention_scaling)

    def to_complex(self, x: Float[Tensor, "*S D"]) -> Tensor:
        """`[*S, F]` complex64 view of the rotated dims: the plane of frequency f as one complex number."""
        head = x[..., : self.rotated_dims].float()
        real, imaginary = (head[..., 0::2], head[..., 1::2]) if self.interleaved else head.chunk(2, dim=-1)
        return torch.complex(real.contiguous(), imaginary.contiguous())

    def all_planes(self, x: Float[Tensor, "*S D"]) -> Tensor:
        """`[*S, D / 2]` complex64 view of all dims: the planes of `to_complex`, then dims that never turn, in pairs."""
        if x.shape[-1] == self.rotated_dims:
            return self.to_complex(x)
        first, second = x[..., self.rotated_dims :].float().chunk(2, dim=-1)
        return torch.cat((self.to_complex(x), torch.complex(first.contiguous(), second.contiguous())), dim=-1)

    def from_complex(self, z: Tensor) -> Float[Tensor, "*S D2"]:
        """Inverse of `to_complex`: `[*S, 2 F]` float32."""
        if self.interleaved:
            return torch.view_as_real(z).flatten(-2)
        return torch.cat((z.real, z.imag), dim=-1)

    def _turn(self, x: Tensor, angles_per_frequency: Tensor, scale: float) -> Tensor:
        # Phases in float64: at position 20,000 float32 loses 5e-3 rad.
        phase = angles_per_frequency[:, None, :, None] * self.inverse_frequencies.to(x.device, torch.float64)
        turned = self.to_complex(x) * torch.polar(torch.full_like(phase, scale), phase).to(torch.complex64)
        rest = x[..., self.rotated_dims :]
        return torch.cat((self.from_complex(turned).to(x.dtype), rest), dim=-1)
