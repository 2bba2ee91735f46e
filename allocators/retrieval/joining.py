"""Rules by which new tokens join regions that exist: the nearest centroid, or the greatest gain of modularity."""

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.growth import Growth
from kvstitch.kernels.community_update.api import Communities, community_update


class JoiningGrowth(Growth):
    """New tokens become members of built regions; their slots are listed until the storage is put in order again."""

    joins_built = True

    def join(self, index, labels: Int64[Tensor, "B U 1"], joins: Bool[Tensor, "B 1"] | None) -> Tensor:
        """The next slot that left the window becomes a member; returns `[B, U, 1]` how many do, 0 or 1."""
        store = index.store
        index.list_member(labels, joins)
        one = torch.ones_like(labels) if joins is None else joins[..., None].expand_as(labels).long()
        one = one.to(store.counts.dtype)
        store.counts.scatter_add_(-1, labels, one)
        store.bias.scatter_(-1, labels, torch.where(store.counts.gather(-1, labels) > 0, 0.0, -torch.inf))
        return one


class NearestGrowth(JoiningGrowth):
    """A new token joins the region with the nearest centroid, by Euclidean distance of keys, when it leaves the window."""

    def __init__(self):
        self._half_norms: Tensor | None = None

    def begin(self, index, layout):
        self._half_norms = index.store.vectors.square().sum(dim=2) / 2

    def leave(self, index, slot, step, joins):
        store = index.store
        key = index.per_unit(step.keys[:, :, slot]).float()
        # |k - c|^2 is smallest where k.c - |c|^2 / 2 is largest.
        labels = (store.score(key[:, :, None])[:, :, 0] - self._half_norms).argmax(dim=-1, keepdim=True)
        index.label(slice(slot, slot + 1), labels)
        weight = self.join(index, labels, joins) / store.counts.gather(-1, labels).clamp(min=1)
        value = index.per_unit(step.values[:, :, slot]).float() if store.has_values else None
        store.average_at(labels, key, value, weight)
        self._half_norms.scatter_(-1, labels, store.vectors_at(labels).square().sum(dim=2) / 2)

    def map_rows(self, function):
        if self._half_norms is not None:
            self._half_norms = function(self._half_norms)

    @property
    def stored_bytes(self) -> int:
        return 0 if self._half_norms is None else self._half_norms.untyped_storage().nbytes()


class DeltaQGrowth(JoiningGrowth):
    """CommunityKV's own rule (arXiv 2610.00418, design 4): the community of the greatest gain of modularity.

    Decided when a token comes, from the attention that it pays; older labels stay as they are. See `community_update`.

    Args:
        top_k: kappa.
        direct_weight: lambda.
        resolution: gamma.
    """

    keeps_labels = True

    def __init__(self, top_k: int, direct_weight: float | int, resolution: float | int):
        self.update_top_k = top_k
        self._direct_weight, self._resolution = direct_weight, resolution
        self._degrees: Tensor | None = None
        self._sizes: Tensor | None = None
        self._total: Tensor | None = None
        self._count: Tensor | None = None

    def begin(self, index, layout):
        batch, units, num = layout.starts.shape
        # A column in front takes what belongs to no region.
        degrees = torch.zeros(batch, units, num + 1, device=layout.starts.device)
        if self._degrees is not None and index.carried_over:
            known = min(self._degrees.shape[-1], layout.numbers.shape[-1])
            degrees.scatter_add_(-1, layout.numbers[..., :known] + 1, self._degrees[..., :known])
        if index.fresh_degrees is not None:
            degrees.scatter_add_(-1, layout.labels + 1, index.fresh_degrees)
        sizes = torch.zeros_like(degrees, dtype=torch.int32)
        sizes.scatter_add_(-1, layout.labels + 1, torch.ones_like(layout.labels, dtype=torch.int32))
        self._degrees, self._sizes = degrees[..., 1:].contiguous(), sizes[..., 1:].contiguous()
        self._total = self._degrees.sum(dim=-1)
        self._count = layout.labels.amax(dim=-1).int() + 1

    def leave(self, index, slot, step, joins):
        # Sinks and padding have no region; sinks do not join, and padding is never attended to.
        self.join(index, index.labels[..., slot : slot + 1].long().clamp(min=0), joins)

    def update(self, index, step, weights, slots):
        index.reserve(step.length)
        # A community may be founded; how many were, the host does not know.
        index.store.open()
        missing = index.store.capacity - self._degrees.shape[-1]
        if missing:
            self._degrees, self._sizes = (
                torch.nn.functional.pad(x, (0, missing)) for x in (self._degrees, self._sizes)
            )
        newest = step.positions[:, 0, -1]
        slot = torch.full_like(newest, step.length - 1)
        communities = Communities(
            index.labels, index.store.vector_rows, self._sizes, self._degrees, self._total, self._count
        )
        community_update(
            communities,
            index.per_unit(step.keys[:, :, -1]),
            torch.where(newest < 0, -1, slot) if step.has_padding else slot,
            slots,
            weights,
            self._resolution,
            self._direct_weight,
        )

    def map_rows(self, function):
        for name in ("_degrees", "_sizes", "_total", "_count"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))

    @property
    def stored_bytes(self) -> int:
        return 0 if self._degrees is None else 8 * self._degrees.numel()
