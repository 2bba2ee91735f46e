"""What a retrieval press built and read: the only way for metrics, plots and tests to look inside."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LayerIndexed:
    """The index of one layer after it was built or renewed.

    Args:
        layer_idx: decoder layer.
        details: what the allocator wants to show (sizes of regions, modularity, resolution), by name.
        stored_bytes: held beside the cache.
        seconds: wall time of building, the wait for background work included.
    """

    layer_idx: int
    details: dict[str, Tensor]
    stored_bytes: int
    seconds: float


@dataclass(frozen=True)
class IndexEvent:
    """Indices built or renewed, in every layer that had to.

    Args:
        index: 0, 1, … within the run.
        seen_tokens: logical length of the cache at that moment, padding included.
        budgets: slots per kv head that a step may read, one a row.
        num_recent: newest tokens always read, the current one included.
        observe_seconds: wall time spent on the queries of the prompt since the last event, such as finding edges.
        busy_seconds: processor time of background work that the event collected.
        exposed_seconds: wall time of the event that was waiting for that work.
        layers: one entry for each layer.
        attend_seconds: wall time of attention over the prompt that gave edges on the side; not in `observe_seconds`.
    """

    index: int
    seen_tokens: int
    budgets: tuple[int, ...]
    num_recent: int
    observe_seconds: float
    busy_seconds: float
    exposed_seconds: float
    layers: tuple[LayerIndexed, ...] = field(default=())
    attend_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers)

    def __str__(self) -> str:
        return (
            f"index {self.index} at {self.seen_tokens} tokens in {len(self.layers)} layers: {self.seconds:.2f} s, of which "
            f"{self.exposed_seconds:.2f} s waited for {self.busy_seconds:.2f} s of background work; "
            f"{sum(layer.stored_bytes for layer in self.layers) / 2**20:.1f} MiB"
        )


@dataclass(frozen=True)
class ReadEvent:
    """What one decode step read in one layer.

    Args:
        layer_idx: decoder layer.
        seen_tokens: logical length of the cache, the current token included.
        num_kv_heads: H.
        positions: `[B, S, M]` logical positions that were attended to, -1 for none; S kv heads or query heads.
        index_rows: vectors per kv head that were read to choose or stood in.
        index_bytes: of those.
        key_rows: keys per selection that were read to choose; a number, or `[B, S]`.
        mass: `[B, Q]` share of the attention that the same query would pay to all slots that falls on those read, or
            None if the press does not measure it.
    """

    layer_idx: int
    seen_tokens: int
    num_kv_heads: int
    positions: Tensor
    index_rows: int
    index_bytes: int
    key_rows: int | Tensor
    mass: Tensor | None = None
