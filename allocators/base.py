"""The contract of an evicting allocator: how many slots to keep, and where."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvstitch.views import LayerView, Needs


@dataclass(frozen=True)
class Selection:
    """The slots that one layer keeps at one event.

    Args:
        slots: `[B, H, K]` slots of the view, strictly ascending in each head, then -1 where a head or row keeps fewer
            than K.
        hidden: slots that stay stored but are never attended to again (a simulated eviction that frees no memory).
        state: tensors `[B, H, K, ...]` aligned with `slots` that the allocator wants back at its next event, by name.
            The cache carries them with the slots through further appends, beams and batch changes.
        details: what the events show and plots draw (quotas, boundaries, mass), by name.
    """

    slots: Int64[Tensor, "B H K"]
    hidden: Bool[Tensor, "B H K"] | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    details: dict[str, Tensor] = field(default_factory=dict)


class EvictingAllocator(ABC):
    """Turns scores and a budget into the slots to keep. Frozen dataclass; state lives in the cache."""

    num_sinks: int
    num_recent: int

    @property
    def needs(self) -> Needs:
        """What the view must contain; read once, when the press is built."""
        return Needs()

    def layer_keep(self, keep: Int64[Tensor, "B"], layer_idx: int, num_layers: int) -> Int64[Tensor, "B"]:
        """The layer's share of the budget, in slots per kv head; the same for every layer unless overridden."""
        return keep

    def layer_keeps(self, keep: Int64[Tensor, "B"], held: Int64[Tensor, "L B"]) -> Int64[Tensor, "L B"]:
        """Shares of all layers, given the slots that each row holds there; `layer_keep` of each unless overridden."""
        return torch.stack([self.layer_keep(keep, rank, len(held)) for rank in range(len(held))])

    @abstractmethod
    def allocate(
        self,
        view: LayerView,
        scores: Float32[Tensor, "B H T"],
        keep: Int64[Tensor, "B"],
        state: dict[str, Tensor],
    ) -> Selection:
        """Slots to keep.

        Args:
            view: the layer now.
            scores: the scorer's output; NaN never wins, entries on empty slots are ignored.
            keep: slots per kv head that each row may hold, protected sinks and recent tokens included. A row with no
                more valid slots than that keeps all of them.
            state: what this allocator returned at the layer's last event, carried with the slots; tensors may be
                shorter than T along dim 2: slots appended since then have no state yet. Empty at the first event.
        """

    def allocate_layers(
        self,
        views: Sequence[LayerView],
        scores: Sequence[Float32[Tensor, "..."]],
        keeps: Sequence[Int64[Tensor, "..."]],
        states: Sequence[dict[str, Tensor]],
    ) -> list[Selection]:
        """`allocate` for several layers, with the same results.

        Overridden where stacking layers of equal shape is cheaper: small operators cost their call, not their
        arithmetic.
        """
        return [self.allocate(*layer) for layer in zip(views, scores, keeps, states)]
