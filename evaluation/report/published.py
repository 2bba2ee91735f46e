"""Figures that papers state, as data, and which of our entries they can stand beside."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvstitch.evaluation.metric_titles import KNOWN_METRICS
from kvstitch.evaluation.report.names import flat
from kvstitch.evaluation.report.sections import Entry, Section

Figure = float | str | tuple[float, ...]
PAPERS = Path(__file__).parent / "papers"


@dataclass(frozen=True)
class PaperRow:
    """One row of a paper's table.

    Args:
        name: as the paper calls it.
        match: what a configuration of ours must have to be the same method: the names of `press`, `scorer` and `allocator`,
            and leaves by their dotted names; a list holds alternatives.
        values: one for each budget of the table: a number, one number a model, or a text where the paper gives a bound.
    """

    name: str
    match: Mapping[str, Any]
    values: tuple[Figure | None, ...]

    def is_method_of(self, entry: Entry) -> bool:
        """Whether an entry is this method, whatever its budget."""
        run = entry.runs[0]
        known = flat(run.config) | {name: run.labels[name] for name in ("press", "scorer", "allocator")}
        return all(
            known.get(key) in (wanted if isinstance(wanted, list) else [wanted]) for key, wanted in self.match.items()
        )


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, as far as its numbers are known here.

    Args:
        name: paper and table.
        metric: what is measured, with its unit.
        model, data: on what.
        tasks: those of our tasks that are of the same kind; None: any, because the order of methods is what compares.
        ours: our metrics that stand beside it; the first one that a section has.
        experiment: the file in `configs/experiment/` that makes our rows.
        budgets: tokens; None: the paper names none, or the row holds at any.
        dense: the uncompressed model's; None if it is not stated.
        rows: of the methods.
    """

    name: str
    metric: str
    model: str
    data: str
    tasks: tuple[str, ...] | None
    ours: tuple[str, ...]
    experiment: str
    budgets: tuple[int, ...] | None
    dense: Figure | None
    rows: tuple[PaperRow, ...]

    def value(self, row: PaperRow, entry: Entry) -> Figure | None:
        """What the paper states for a row at an entry's budget."""
        if self.budgets is None:
            return row.values[0]
        if not entry.budget.endswith(" tokens") or entry.budget_value not in self.budgets:
            return None
        return row.values[self.budgets.index(int(entry.budget_value))]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables of all papers, in the order of their files.

    Raises:
        ValueError: a row that has not one value for each budget.
    """
    return tuple(
        _table(paper["paper"], table)
        for path in sorted(PAPERS.glob("*.yaml"))
        for paper in [yaml.safe_load(path.read_text(encoding="utf-8"))]
        for table in paper["tables"]
    )


def published_rows(section: Section, paper: PaperTable) -> tuple[str, list[tuple[str, ...]]]:
    """What a paper states beside what was measured here.

    Returns:
        The title of our metric, and rows of method, budget, the paper's name for it, its figure and ours. No rows where the
        section has none of the metrics, or fewer than two of the methods (all, if the paper has one) at the paper's budgets.
    """
    if not section.pressed or paper.tasks is not None and section.pressed[0].runs[0].labels["task"] not in paper.tasks:
        return "", []
    for metric in paper.ours:
        title, write = KNOWN_METRICS[metric].title, KNOWN_METRICS[metric].write
        rows = []
        for entry in section.pressed:
            ours = entry.value(metric)
            matching = [row for row in paper.rows if row.is_method_of(entry)]
            known = [(row, value) for row in matching if (value := paper.value(row, entry)) is not None]
            if ours is not None:
                rows += [
                    (entry.method, entry.budget, row.name, _stated(value), write(ours.mean)) for row, value in known
                ]
        if len({name for _, _, name, *_ in rows}) >= min(2, len(paper.rows)):
            dense = section.dense(metric)
            if paper.dense is not None:
                rows.insert(
                    0, ("dense", "", "dense", _stated(paper.dense), "–" if dense is None else write(dense.mean))
                )
            return title, rows
    return "", []


def _stated(figure: Figure) -> str:
    return " / ".join(map(str, figure)) if isinstance(figure, tuple) else str(figure)


def _table(paper: str, plain: Mapping[str, Any]) -> PaperTable:
    budgets, tasks = (None if plain[name] is None else tuple(plain[name]) for name in ("budgets", "tasks"))
    rows = []
    for name, row in plain["rows"].items():
        values = [row["values"]] if budgets is None else row["values"]
        if len(values) != len(budgets or (None,)):
            raise ValueError(f"{paper}, {plain['name']}: {name} must have one value for each of {len(budgets)} budgets")
        rows.append(PaperRow(name, row["match"], tuple(map(_figure, values))))
    others = {key: plain[key] for key in ("metric", "model", "data", "experiment")}
    return PaperTable(
        name=f"{paper}, {plain['name']}",
        ours=tuple(plain["ours"]),
        budgets=budgets,
        tasks=tasks,
        dense=_figure(plain["dense"]),
        rows=tuple(rows),
        **others,
    )


def _figure(plain: Any) -> Figure | None:
    return tuple(plain) if isinstance(plain, list) else plain
