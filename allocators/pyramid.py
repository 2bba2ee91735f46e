"""PyramidKV: lower layers hold more than upper ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.global_topk import GlobalTopK
from kvstitch.allocators.options import check_counts
from kvstitch.views import LayerView, Needs


@dataclass(frozen=True, kw_only=True)
class Pyramid(EvictingAllocator):
    """Budgets that fall linearly with depth (PyramidKV, arXiv 2406.02069); any allocator spends them.

    With c slots per layer besides the protected ones, the last layer gets c / beta and the first 2 c - c / beta. The
    published rule rounds the step per layer down, so its total drifts; here mirrored layers make up for each other's
    rounding, and the layers' budgets sum exactly to the number of layers times `keep`. A layer that holds less than its
    share keeps all of it, and what it leaves over goes to the lowest layers that hold more than theirs.

    Args:
        beta: how steep: 1 gives every layer the same.
        allocator: spends each layer's share; its sinks and recent tokens are paid before the rest is shared out.
    """

    beta: int = 20  # authors' code
    allocator: EvictingAllocator = GlobalTopK()

    def __post_init__(self):
        check_counts(self, {"beta": 1})
        if not isinstance(self.allocator, EvictingAllocator):
            raise TypeError(f"allocator must be an EvictingAllocator, got {self.allocator!r}")
        if isinstance(self.allocator, Pyramid):
            raise ValueError(
                "a Pyramid inside a Pyramid would change the layers' budgets twice; give it a plain allocator"
            )

    @property
    def num_sinks(self) -> int:
        return self.allocator.num_sinks

    @property
    def num_recent(self) -> int:
        return self.allocator.num_recent

    @property
    def needs(self) -> Needs:
        return self.allocator.needs

    def layer_keep(self, keep: Int64[Tensor, "B"], layer_idx: int, num_layers: int) -> Int64[Tensor, "B"]:
        """The layer's share; sums to `num_layers * keep` over the layers, never below the protected slots or 1."""
        if num_layers == 1:
            return keep
        reserved = keep.clamp(max=self.num_sinks + self.num_recent)
        mean = keep - reserved
        least = torch.minimum((mean // self.beta).clamp(min=1), mean)
        # Layer l lies as far above the mean as layer L - 1 - l lies below it, so rounding cancels in pairs.
        depth = min(layer_idx, num_layers - 1 - layer_idx)
        excess = (mean - least) * (num_layers - 1 - 2 * depth) // (num_layers - 1)
        return keep + (excess if layer_idx == depth else -excess)

    def layer_keeps(self, keep: Int64[Tensor, "B"], held: Int64[Tensor, "L B"]) -> Int64[Tensor, "L B"]:
        """The layers' shares, and what some cannot use for the lowest that can; sums to the lesser of total and held."""
        shares = super().layer_keeps(keep, held)
        left = (shares - held).clamp(min=0).sum(dim=0)
        shares = shares.minimum(held)
        room = held - shares
        return shares + (left - (room.cumsum(dim=0) - room)).clamp(min=0).minimum(room)

    def allocate(
        self,
        view: LayerView,
        scores: Float32[Tensor, "B H T"],
        keep: Int64[Tensor, "B"],
        state: dict[str, Tensor],
    ) -> Selection:
        return self.allocator.allocate(view, scores, keep, state)

    def allocate_layers(
        self,
        views: Sequence[LayerView],
        scores: Sequence[Float32[Tensor, "..."]],
        keeps: Sequence[Int64[Tensor, "..."]],
        states: Sequence[dict[str, Tensor]],
    ) -> list[Selection]:
        return self.allocator.allocate_layers(views, scores, keeps, states)
