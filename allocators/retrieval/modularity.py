"""CommunityKV's rule for new tokens: the greatest gain of modularity, labels of older tokens frozen."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.growth import JoiningGrowth


class Decision(NamedTuple):
    """What one new token does.

    Args:
        labels: `[B, U]` the community that it joins; the number given for a new one if none gains.
        added: `[B, U, k + 1]` what is added to the degree of each neighbour's community, and last of its own.
        at: `[B, U, k + 1]` those communities.
        total: `[B, U]` what is added to twice the weight of all edges.
    """

    labels: Int64[Tensor, "B U"]
    added: Float32[Tensor, "B U k1"]
    at: Int64[Tensor, "B U k1"]
    total: Float32[Tensor, "B U"]


def decide(
    weights: Float32[Tensor, "B U k"],
    communities: Int64[Tensor, "B U k"],
    is_self: Bool[Tensor, "B U k"],
    degrees: Float32[Tensor, "B U C"],
    total: Float32[Tensor, "B U"],
    resolution: Float32[Tensor, "B U"],
    direct_weight: float,
    fresh: int,
) -> Decision:
    """Joins the neighbour's community of the greatest gain, or founds one (CommunityKV, arXiv 2610.00418, design 4).

    The new token i has edges `w_ij = direct / 2 a_ij + (1 - direct) a_ii a_ij` to its neighbours, the only co-attention
    that can involve it being its own query's. `gain(C) = sum of w_ij over j in C - resolution w_i W_C / 2m`, with W_C and m
    before the token came. Afterwards its neighbours' degrees grow by those edges and by the co-attention
    `(1 - direct) a_ij a_ik` that its query adds between them.

    Args:
        weights: attention of the new token to its top-k keys outside the sinks, 0 where there is none.
        communities: of those keys, -1 where they have none.
        is_self: marks the new token's own key.
        degrees: W_C, sum of weighted degrees.
        total: 2m.
        resolution: gamma of each graph.
        fresh: number for a new community.
    """
    neighbour = (communities >= 0) & ~is_self
    attention = torch.where(neighbour, weights, 0.0)
    own = torch.where(is_self, weights, 0.0).sum(dim=-1, keepdim=True)
    edges = (direct_weight / 2 + (1 - direct_weight) * own) * attention
    degree = edges.sum(dim=-1, keepdim=True)
    at = communities.clamp(min=0)
    same = (communities[..., :, None] == communities[..., None, :]) & neighbour[..., None, :]
    inside = (same * edges[..., None, :]).sum(dim=-1)
    expected = resolution[..., None] * degree * degrees.gather(-1, at) / total[..., None].clamp(min=torch.finfo(torch.float32).tiny)
    gain = torch.where(neighbour, inside - expected, 0.0)
    # Equal gains go to the older community.
    best_gain = gain.amax(dim=-1, keepdim=True)
    best = torch.where(gain == best_gain, at, torch.iinfo(torch.int64).max).amin(dim=-1)
    labels = torch.where(best_gain[..., 0] > 0, best, fresh)
    between = (1 - direct_weight) * attention * (attention.sum(dim=-1, keepdim=True) - attention)
    added = torch.cat((edges + between, degree), dim=-1)
    return Decision(labels, added, torch.cat((at, labels[..., None]), dim=-1), 2 * degree[..., 0] + between.sum(dim=-1))


class DeltaQGrowth(JoiningGrowth):
    """New tokens join by `decide`, from the attention that they paid when they came.

    Args:
        top_k: kappa.
        direct_weight: lambda.
    """

    keeps_labels = True

    def __init__(self, top_k: int, direct_weight: float):
        self.update_top_k = top_k
        self._direct_weight = direct_weight
        self.degrees: Tensor | None = None
        self.total: Tensor | None = None
        self._resolution: Tensor | None = None

    def begin(self, index, layout):
        batch, units, num = layout.starts.shape
        # A column in front takes what belongs to no region.
        degrees = torch.zeros(batch, units, num + 1, device=layout.starts.device)
        if self.degrees is not None and index.carried_over:
            count = min(self.degrees.shape[-1], layout.numbers.shape[-1])
            degrees.scatter_add_(-1, layout.numbers[..., :count] + 1, self.degrees[..., :count])
        if index.fresh_degrees is not None:
            degrees.scatter_add_(-1, layout.labels + 1, index.fresh_degrees)
            self._resolution = index.resolutions.to(degrees.device)
        if self._resolution is None:
            self._resolution = torch.ones_like(degrees[..., 0])
        self.degrees = degrees[..., 1:].contiguous()
        self.total = self.degrees.sum(dim=-1)

    def leave(self, index, slot, step, joins):
        # Only sinks have no region, and they do not join.
        labels = index.labels[..., slot : slot + 1].long().clamp(min=0)
        self.join(index, slot, step, labels, joins)

    def update(self, index, step, weights, slots):
        index.reserve(step.length)
        fresh = index.store.num
        index.store.open()
        if self.degrees.shape[-1] < index.store.capacity:
            self.degrees = torch.nn.functional.pad(self.degrees, (0, index.store.capacity - self.degrees.shape[-1]))
        known = index.labels.gather(-1, slots.clamp(min=0)).long()
        communities = torch.where(slots >= 0, known, -1)
        is_self = slots == step.length - 1
        decision = decide(
            weights.float(), communities, is_self, self.degrees, self.total, self._resolution, self._direct_weight, fresh
        )
        self.degrees.scatter_add_(-1, decision.at, decision.added)
        self.total += decision.total
        index.label(step.length - 1, decision.labels)

    def map_rows(self, function):
        for name in ("degrees", "total", "_resolution"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))

    @property
    def stored_bytes(self) -> int:
        return 0 if self.degrees is None else self.degrees.untyped_storage().nbytes()
