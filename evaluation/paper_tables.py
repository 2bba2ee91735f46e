"""Figures that papers state, as data: what a table is, and which of its rows a configuration of ours is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# A number, a text where the paper gives a bound, or one number a model.
Figure = float | str | tuple[float, ...]


@dataclass(frozen=True)
class PaperRow:
    """One row of a paper's table.

    Args:
        name: as the paper calls it.
        match: what a configuration of ours must have to be the same method: the names of `press`, `scorer` and `allocator`,
            and leaves by their dotted names; a tuple holds alternatives.
        figures: one for each budget of the table, or one alone; None where the paper states nothing that is known here.
    """

    name: str
    match: Mapping[str, Any]
    figures: tuple[Figure | None, ...]

    def fits(self, known: Mapping[str, Any]) -> bool:
        """Whether a configuration, by names and dotted leaves, is this method, whatever its budget."""
        return all(
            known.get(key) in (wanted if isinstance(wanted, tuple) else (wanted,)) for key, wanted in self.match.items()
        )


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, as far as its numbers are known here.

    Args:
        source: the paper, with its arXiv id.
        table: which of its tables.
        model: on what; several where a cell holds one number each.
        task: the paper's.
        metric: what is measured.
        rows: of the methods.
        our_metrics: ours that stand beside it; the first one that is measured.
        our_tasks: those of ours that are of the same kind; None: any, because the order of methods is what compares.
        unit: of the metric.
        budgets: tokens; None: the paper names none, or the row holds at any.
        dense: the uncompressed model's; None if it is not stated.
    """

    source: str
    table: str
    model: str | tuple[str, ...]
    task: str
    metric: str
    rows: tuple[PaperRow, ...]
    our_metrics: tuple[str, ...]
    our_tasks: tuple[str, ...] | None = None
    unit: str | None = None
    budgets: tuple[int, ...] | None = None
    dense: Figure | None = None

    @property
    def name(self) -> str:
        """Paper and table."""
        return f"{self.source}, {self.table}"

    @property
    def measured(self) -> str:
        """`pass@1, %`."""
        return self.metric if self.unit is None else f"{self.metric}, {self.unit}"

    def figure(self, row: PaperRow, tokens: float | None) -> Figure | None:
        """What the paper states for a row at a budget; `tokens` is None where ours is not one of tokens."""
        if self.budgets is None:
            return row.figures[0]
        return row.figures[self.budgets.index(tokens)] if tokens in self.budgets else None

    def plain(self) -> dict[str, Any]:
        """As `read_tables` takes it, but with the source inside."""
        rows = {
            row.name: {"match": row.match, "figures": row.figures[0] if self.budgets is None else row.figures}
            for row in self.rows
        }
        return asdict(self) | {"rows": rows}


def written(cell: Figure | tuple[str, ...]) -> str:
    """A cell for readers: `25.4 / 28.5 / 30.2` where it holds one number a model."""
    return " / ".join(map(str, cell)) if isinstance(cell, tuple) else str(cell)
