"""What a press did and when: the only way for metrics, plots and tests to look inside."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LayerEvent:
    """One layer at one compaction.

    Args:
        layer_idx: decoder layer.
        slots_before: slots per kv head before (largest head).
        slots_after: the same afterwards.
        slots: `[B, H, K]` slots kept, in the numbering before the compaction; -1 where a head kept fewer.
        positions: `[B, H, K]` logical positions kept; -1 where empty.
        details: what the allocator wants to show (quotas, boundaries, mass), by name.
        seconds: wall time of scoring, selection and compaction.
    """

    layer_idx: int
    slots_before: int
    slots_after: int
    slots: Tensor
    positions: Tensor
    details: dict[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class CompactionEvent:
    """One compaction over the layers that had more than their budget.

    Args:
        index: 0, 1, … within the request.
        seen_tokens: logical length of the cache at that moment, padding included.
        reason: "interval", "prompt" or "request".
        layers: one entry for each layer that was compacted; layers within their budget are left out.
    """

    index: int
    seen_tokens: int
    reason: str
    layers: tuple[LayerEvent, ...] = field(default=())

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers)

    def __str__(self) -> str:
        before = max((layer.slots_before for layer in self.layers), default=0)
        after = max((layer.slots_after for layer in self.layers), default=0)
        return (
            f"event {self.index} at {self.seen_tokens} tokens ({self.reason}): {before} -> {after} slots in "
            f"{len(self.layers)} layers, {self.seconds * 1e3:.1f} ms"
        )
