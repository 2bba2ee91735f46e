"""What a scorer or an allocator asks the press to provide."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """Everything beyond keys, values and positions that a part wants to find in its `LayerView`.

    Args:
        queries: how many of the most recent queries to keep (0: none).
        statistics: whether running sums over every query seen are kept.
        rotary: whether queries or keys are turned to other positions, so that the RoPE must be one we can evaluate.
    """

    queries: int = 0
    statistics: bool = False
    rotary: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        """The least that satisfies both."""
        return Needs(
            queries=max(self.queries, other.queries),
            statistics=self.statistics or other.statistics,
            rotary=self.rotary or other.rotary,
        )
