"""What a scorer or an allocator asks the press to provide."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """Everything beyond keys, values and positions that a part wants to find in its `LayerView`.

    Args:
        queries: how many of the most recent queries to keep (0: none).
        statistics: whether running sums over every query seen are kept.
        rotary: whether queries or keys are turned to other positions, so that the RoPE must be one we can evaluate.
        spaced_queries: over how many of the most recent positions every `query_step`-th query is kept (0: none).
        query_step: distance of those queries; see `QueryWindow.spaced`.
    """

    queries: int = 0
    statistics: bool = False
    rotary: bool = False
    spaced_queries: int = 0
    query_step: int = 1

    def __or__(self, other: "Needs") -> "Needs":
        """The least that satisfies both.

        Raises:
            ValueError: both want spaced queries, at different distances.
        """
        steps = {needs.query_step for needs in (self, other) if needs.spaced_queries}
        if len(steps) > 1:
            raise ValueError(
                f"queries can be kept at one distance only, and every {min(steps)} and {max(steps)} were asked for"
            )
        return Needs(
            queries=max(self.queries, other.queries),
            spaced_queries=max(self.spaced_queries, other.spaced_queries),
            query_step=steps.pop() if steps else 1,
            statistics=self.statistics or other.statistics,
            rotary=self.rotary or other.rotary,
        )
