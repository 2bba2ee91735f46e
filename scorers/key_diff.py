"""KeyDiff: keep the keys that differ most from the average direction of keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional as F

from kvstitch.scorers.base import Scorer
from kvstitch.scorers.masking import without_empty
from kvstitch.views import LayerView


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Minus the cosine between a key and the mean of the unit keys of its head (KeyDiff, arXiv 2504.15364).

    `s_j = -cos(k_j, mean_i k_i / |k_i|)` on keys after RoPE, per kv head, over the valid slots. The paper evicts block by
    block while a prompt is read; here one score decides a whole event. Newest tokens are not favoured in any way.
    """

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """In [-1, 1]; 0 for a key of norm zero."""
        keys = without_empty(view.keys, view.valid)
        # Two products with vectors; unit keys are never written down.
        shrink = keys.norm(dim=-1).clamp_(min=1e-12).reciprocal_()
        # The length of the anchor does not matter to a cosine, so the sum stands for the mean.
        anchor = F.normalize(torch.matmul(shrink[:, :, None], keys), dim=-1, eps=1e-12)
        return torch.matmul(keys, anchor.transpose(2, 3)).squeeze(-1).mul_(shrink).neg_()
