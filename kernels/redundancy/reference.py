"""Key redundancy the plain way, with the whole similarity matrix."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def redundancy_reference(
    keys: Float[Tensor, "B H T D"], members: Bool[Tensor, "B H T"], threshold: float
) -> Float[Tensor, "B H T"]:
    """See `api.key_redundancy`; memory grows with T squared, dtype is that of `keys`."""
    slots = keys.shape[2]
    keys = torch.where(members[..., None], keys, keys.new_zeros(()))
    unit = keys / torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp(min=1e-12)
    similarity = unit @ unit.mT
    similarity.diagonal(dim1=-2, dim2=-1).zero_()

    index = torch.arange(slots, device=keys.device)
    newest_twin = torch.where(similarity > threshold, index, -1).amax(dim=-1, keepdim=True)
    similarity = similarity.masked_fill(index == newest_twin, 0.0)

    mean = similarity.sum(dim=-2) / members.sum(dim=-1, keepdim=True).clamp(min=1)
    weights = mean.masked_fill(~members, float("-inf")).softmax(dim=-1)
    return weights.masked_fill(~members, 0.0)
