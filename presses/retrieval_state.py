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
        self._is_permuted = False
        self._has_mixed_padding = False

    def reorder(self, layer: StitchLayer, order: Tensor | None) -> None:
        """Puts the storage in the order that the index asked for.

        Attention does not depend on the order of earlier slots. Empty slots now stand in front; where they stood there
        before, as left padding does, the model's own masks stay right, and the layer counts as not compacted.
        """
        if order is None:
            return
        evicted_at = layer.evicted_at
        empty = layer.positions < 0
        in_front = empty.long().cumprod(dim=-1).sum(dim=-1) == empty.sum(dim=-1)
        layer.keep(order)
        self._is_permuted = True
        self._has_mixed_padding = self._has_mixed_padding or not bool(in_front.all())
        if not self._has_mixed_padding:
            layer.evicted_at = evicted_at

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self.index.map_rows(function)

    def detach(self, layer: StitchLayer) -> None:
        """Puts the storage back into the order of positions.

        Raises:
            RuntimeError: padding stood between the tokens of a row, and nobody knows where any more.
        """
        if not self._is_permuted:
            return
        if self._has_mixed_padding:
            raise RuntimeError(
                "the cache has padding between the tokens of a row and was put in another order; only the press that did "
                "so can go on with it"
            )
        evicted_at = layer.evicted_at
        layer.keep(torch.sort(layer.positions, dim=-1, stable=True).indices)
        layer.evicted_at = evicted_at
