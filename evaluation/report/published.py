"""What papers state, beside the entries of ours that are the same method at the same budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstitch.evaluation.metric_titles import KNOWN_METRICS, Metric
from kvstitch.evaluation.paper_reading import paper_tables
from kvstitch.evaluation.paper_tables import Figure, PaperRow, PaperTable, written
from kvstitch.evaluation.report.entries import Entry
from kvstitch.evaluation.report.names import flat
from kvstitch.evaluation.report.runs import Run
from kvstitch.evaluation.report.sections import Section

# Columns of `summary.csv`. No difference to ours is among them: model, task and metric are others.
PAPER_COLUMNS = (
    "paper_source",
    "paper_model",
    "paper_task",
    "paper_metric",
    "paper_unit",
    "paper_method",
    "paper_figure",
    "paper_dense",
)
# Between the figures of several tables in one cell.
_AND = " | "


@dataclass(frozen=True)
class Pair:
    """A paper's figure and the entry of ours that it stands beside.

    Args:
        entry: ours.
        method: as the paper calls it.
        figure: the paper's.
    """

    entry: Entry
    method: str
    figure: Figure


@dataclass(frozen=True)
class Published:
    """A paper's table beside a section.

    Args:
        table: the paper's.
        metric: ours that stands beside it.
        pairs: at least one.
    """

    table: PaperTable
    metric: Metric
    pairs: tuple[Pair, ...]


def papers_of(runs: Iterable[Run]) -> tuple[PaperTable, ...]:
    """The tables that this installation knows, and those that the runs' folders hold, which are preferred: a report is drawn
    from what a run recorded."""
    recorded = {table.name: table for run in runs for table in run.papers}
    return tuple(({table.name: table for table in paper_tables()} | recorded).values())


def published(section: Section, papers: Sequence[PaperTable]) -> list[Published]:
    """The tables that have figures for a section, in their order.

    A table that a run's experiment brought needs one of the section's entries. Any other needs two methods (one, if it has no
    more): one figure alone compares nothing.
    """
    brought = {table.name for entry in section.entries for run in entry.runs for table in run.papers}
    found = []
    for table in papers:
        least = 1 if table.name in brought else min(2, len(table.rows))
        beside = _beside(section, table, least)
        if beside is not None:
            found.append(beside)
    return found


def paper_cells(found: Sequence[Published], entry: Entry, metric: str) -> list[str]:
    """A cell for each of `PAPER_COLUMNS`; empty ones where no paper states anything for an entry and this metric of ours."""
    stated = [
        (one.table, pair) for one in found if one.metric.name == metric for pair in one.pairs if pair.entry is entry
    ]
    lines = [
        (
            table.name,
            written(table.model),
            table.task,
            table.metric,
            table.unit or "",
            pair.method,
            written(pair.figure),
            "" if table.dense is None else written(table.dense),
        )
        for table, pair in stated
    ]
    return [_AND.join(cells) for cells in zip(*lines)] if lines else [""] * len(PAPER_COLUMNS)


def paper_json(found: Sequence[Published]) -> list[dict[str, Any]]:
    """The same for programs: a table each, with `beside`, the name of our metric, and `rows` of our method and budget, the
    paper's name for it and its figure, or a list of one figure a model."""
    return [
        {
            "source": one.table.source,
            "table": one.table.table,
            **{name: getattr(one.table, name) for name in ("model", "task", "metric", "unit", "dense")},
            "beside": one.metric.name,
            "rows": [
                {
                    "method": pair.entry.method,
                    "budget": pair.entry.budget,
                    "paper_method": pair.method,
                    "figure": pair.figure,
                }
                for pair in one.pairs
            ],
        }
        for one in found
    ]


def _beside(section: Section, table: PaperTable, least: int) -> Published | None:
    """By the first of our metrics that at least so many of the table's methods have."""
    if not section.pressed:
        return None
    if table.our_tasks is not None and section.pressed[0].runs[0].labels["task"] not in table.our_tasks:
        return None
    for metric in table.our_metrics:
        pairs = [
            Pair(entry, row.name, figure)
            for entry in section.pressed
            if entry.value(metric) is not None
            for row in _rows_of(table, entry)
            if (figure := table.figure(row, _tokens(entry))) is not None
        ]
        if len({pair.method for pair in pairs}) >= least:
            return Published(table, KNOWN_METRICS[metric], tuple(pairs))
    return None


def _rows_of(table: PaperTable, entry: Entry) -> list[PaperRow]:
    run = entry.runs[0]
    known = flat(run.config) | {name: run.labels.get(name) for name in ("press", "scorer", "allocator")}
    return [row for row in table.rows if row.fits(known)]


def _tokens(entry: Entry) -> float | None:
    return entry.budget_value if entry.budget.endswith(" tokens") else None
