"""What a retrieval press keeps in a cache layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstitch.allocators.retrieval.base import LayerIndex
from kvstitch.presses.cache import StitchLayer


class IndexedLayer:
    """The index of one layer, and whether it is up to date.

    Args:
        index: of the allocator.
    """

    def __init__(self, index: LayerIndex):
        self.index = index
        # Slots that the index knows of; a layer of another length got tokens that it has not seen.
        self.length = 0
        self.built = False
        self.stale = True
        # Whether padding that came between the tokens of a row now stands in front of them.
        self.moved_padding = False
        self._is_permuted = False
        # `[B, n]` which tokens were padding, in the order in which they came; None if none was.
        self._came_empty: Tensor | None = None

    def reorder(self, layer: StitchLayer, order: Tensor | None) -> None:
        """Puts the storage in the order that the index asked for.

        Attention does not depend on the order of earlier slots. Empty slots now stand in front; where they stood there
        before, as left padding does, the model's own masks stay right.
        """
        if order is None:
            return
        self._note_padding(layer)
        layer.permute(order)
        self._is_permuted = True
        if self._came_empty is not None:
            leading = self._came_empty.long().cumprod(dim=-1).sum()
            self.moved_padding = bool(leading < self._came_empty.sum())

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self.index.map_rows(function)
        self._came_empty = None if self._came_empty is None else function(self._came_empty)

    def detach(self, layer: StitchLayer) -> None:
        """Puts the storage back into the order in which the tokens came."""
        if not self._is_permuted:
            return
        self._note_padding(layer)
        order = torch.sort(layer.stored_positions, dim=-1, stable=True).indices
        if self._came_empty is not None:
            # Sorted, padding is in front; the columns in which it came are listed first, too.
            columns = torch.sort((~self._came_empty).byte(), dim=-1, stable=True).indices
            order = torch.empty_like(order).scatter_(-1, columns[:, None].expand_as(order), order)
        layer.permute(order)

    def _note_padding(self, layer: StitchLayer) -> None:
        """Takes in what came since the last time, which no order has moved yet; padding is the same in all heads."""
        if not layer.has_empty:
            return
        empty = layer.stored_positions[:, 0] < 0
        known = self._came_empty
        self._came_empty = empty if known is None else torch.cat((known, empty[:, known.shape[1] :]), dim=-1)
