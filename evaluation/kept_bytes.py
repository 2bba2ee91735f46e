"""Where the keys and values of an evicted sequence are: still attended to, hidden but stored, or freed.

What is stored (`Storage`) cannot tell: it counts room for growth, and heads that keep different numbers of slots are stored as
wide as the fullest of them, so that an eviction need not free anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


@dataclass
class KeptBytes:
    """Bytes of keys and values, measured after every forward; room for growth is none of them. Batches of one.

    All that the model was fed is one of the three: kept, unfreed or freed.

    Args:
        kept_summed: bytes in slots that are attended to, summed over the tokens after the prompt while each attended.
        unfreed_summed: bytes that were evicted but are stored, so summed: hidden ones, and those of heads that keep fewer
            slots than the fullest head of their layer.
        freed_summed: bytes that were evicted and given back.
        tokens: after the prompt.
        peak_kept: most bytes in slots that are attended to at any time, the prompt included.
    """

    kept_summed: float = 0.0
    unfreed_summed: float = 0.0
    freed_summed: float = 0.0
    tokens: int = 0
    peak_kept: int = 0
    _compactions: list[int] | None = None
    _unfreed: float = 0.0

    def measure(self, cache: Cache, tokens: int) -> None:
        """Take in what the cache holds after a forward of `tokens` tokens; 0 for the prompt's."""
        held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
        slots = [size / layer.keys.shape[2] for size, layer in zip(held, cache.layers)]
        compactions = [layer.evicted_at for layer in cache.layers if _compressed(layer)]
        if compactions != self._compactions:
            # Slots become empty when a layer is compacted and at no other time: no look, which takes time, at every token.
            self._compactions, self._unfreed = compactions, _unfreed(cache, slots)
        kept = sum(held) - self._unfreed
        self.peak_kept = max(self.peak_kept, round(kept))
        self.tokens += tokens
        # The tokens of a chunk enter together, but each sees only those before it, as when they come one at a time.
        self.kept_summed += tokens * kept - sum(slots) * tokens * (tokens - 1) / 2
        self.unfreed_summed += tokens * self._unfreed
        self.freed_summed += tokens * _freed(cache, slots)

    def metrics(self) -> dict[str, float | None]:
        """Means over the tokens after the prompt, None without any, and the peak."""
        summed = (self.kept_summed, self.unfreed_summed, self.freed_summed)
        kept, unfreed, freed = (value / self.tokens if self.tokens else None for value in summed)
        return {
            "kept_bytes": self.peak_kept,
            "mean_kept_bytes": kept,
            "mean_unfreed_bytes": unfreed,
            "mean_freed_bytes": freed,
        }


def _unfreed(cache: Cache, slot_bytes: Sequence[float]) -> float:
    """Bytes of keys and values that are stored in slots to which nothing attends.

    Args:
        slot_bytes: of one slot of all heads, by layer.
    """
    with_empty = [
        (layer, size) for layer, size in zip(cache.layers, slot_bytes) if _compressed(layer) and layer.has_empty
    ]
    if not with_empty:
        return 0.0
    # One look for all layers: on a GPU each would wait for the device.
    counts = torch.stack([(layer.positions < 0).sum() for layer, _ in with_empty]).tolist()
    return sum(count * size / layer.keys.shape[1] for count, (layer, size) in zip(counts, with_empty))


def _freed(cache: Cache, slot_bytes: Sequence[float]) -> float:
    """Bytes of the keys and values that compressed layers saw and no longer store."""
    return sum(
        (layer.seen_tokens - layer.keys.shape[2]) * size
        for layer, size in zip(cache.layers, slot_bytes)
        if _compressed(layer)
    )


def _compressed(layer: CacheLayerMixin) -> bool:
    return type(layer).__module__.startswith("kvstitch.")
