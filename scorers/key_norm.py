"""Key norm: keep the keys of small length."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from kvstitch.scorers.base import Scorer
from kvstitch.views import LayerView


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """Minus the Euclidean norm of the key: short keys draw the attention (Devoto et al., arXiv 2406.11430).

    `s_j = -|k_j|`. RoPE changes norms only by the model's attention scaling, the same for every token.
    """

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """At most 0; accumulated in float32, since bfloat16 norms of different tokens tie."""
        norms = torch.linalg.vector_norm(view.keys.float(), dim=-1)
        return (-norms).masked_fill(~view.valid, 0.0)
