"""What becomes of new tokens once they leave the window: into which region they go."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from kvstitch.allocators.retrieval.base import DecodeStep
from kvstitch.allocators.retrieval.layout import Layout

# New members of old regions are looked up one by one until there are so many.
RELAYOUT_TOKENS = 512
GROWTHS = ("chunk", "nearest", "delta_q")


class Growth(ABC):
    """A rule for new tokens, and its state in one layer; `index` is the `RegionIndex` that it serves."""

    # Whether new tokens join regions that were built; their slots are then looked up by label.
    joins_built: bool = False
    # Whether tokens that are still in the window have a region already.
    keeps_labels: bool = False
    update_top_k: int = 0

    def begin(self, index, layout: Layout) -> None:  # noqa: B027
        """Called when the index has been built, or put in order again."""

    @abstractmethod
    def leave(self, index, slot: int, step: DecodeStep, joins: Bool[Tensor, "B 1"] | None) -> None:
        """The token in `slot` left the window: from now on it is read only if its region is.

        Args:
            joins: rows in which it does so, None for all; elsewhere it is a sink.
        """

    def update(self, index, step: DecodeStep, weights: Tensor, slots: Tensor) -> None:  # noqa: B027
        """See `LayerIndex.update`."""

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:  # noqa: B027
        """Applies a batch operation to the state."""

    def is_crowded(self, index, length: int) -> bool:
        """Whether so many new tokens have joined old regions that the storage should be put in order again."""
        return self.joins_built and length - index.tail_start > RELAYOUT_TOKENS

    @property
    def stored_bytes(self) -> int:
        return 0


class ChunkGrowth(Growth):
    """Every `tokens` new tokens are a region of their own."""

    def __init__(self, tokens: int, bounds: bool = False):
        self._tokens, self._bounds = tokens, bounds
        # Whether some row began the last chunk later than others.
        self._has_late = False

    def leave(self, index, slot, step, joins):
        place = (slot - index.tail_start) % self._tokens
        store = index.store
        if place == 0:
            store.open()
            store.starts[..., -1] = slot
            store.bias[..., -1] = 0
            index.label(slice(slot, slot + self._tokens), store.num - 1)
            self._has_late = False
        if joins is not None:
            self._has_late = True
        elif self._has_late:
            # From here on all rows count the slot, but not all have counted as many.
            joins = torch.ones_like(store.starts[:, :1, 0], dtype=torch.bool)
        if joins is not None:
            # Only the first slots of a chunk can be sinks, so what remains is still one range.
            store.starts[..., -1] += ~joins
            store.bias[..., -1].masked_fill_(~joins, -torch.inf).masked_fill_(joins, 0)
        store.add_to_last(1 if joins is None else joins)
        weight = 1 / (place + 1) if joins is None else (joins / store.counts[..., -1].clamp(min=1))[..., None]
        key = index.per_unit(step.keys[:, :, slot]).float()
        if self._bounds:
            store.widen_last(key, weight)
        else:
            store.average_last(
                key, index.per_unit(step.values[:, :, slot]).float() if store.has_values else None, weight
            )
