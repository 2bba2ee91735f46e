"""The tables of a section, before anybody decides how a table looks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstitch.evaluation.metric_titles import SHARED_PEAKS, Metric
from kvstitch.evaluation.paper_tables import PaperTable, written
from kvstitch.evaluation.report.entries import Entry, Value
from kvstitch.evaluation.report.measures import CACHE, MEMORY, QUALITY, SPEED, TEXT, TIME, best_mean
from kvstitch.evaluation.report.published import Published, published
from kvstitch.evaluation.report.sections import Section
from kvstitch.evaluation.table import ROOM_FOR_GROWTH, only_room_is_larger

# Behind a figure of a budget that never bound.
_IDLE = " †"


@dataclass(frozen=True)
class Sheet:
    """One table.

    Args:
        caption: what it shows.
        note: what a reader must know of it; "" for nothing.
        columns: titles.
        text_columns: how many of them, from the left, hold words.
        rows: cells as they are written.
        best: rows and columns of the cells that are the best of their column.
        dense: rows of the dense model.
    """

    caption: str
    note: str
    columns: tuple[str, ...]
    text_columns: int
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = field(default=frozenset())
    dense: frozenset[int] = field(default=frozenset())


def sheets(section: Section, papers: Sequence[PaperTable] = ()) -> list[Sheet]:
    """Method × budget for each measure; what caches and answers were like; memory and speed; what the papers state."""
    return [*quality_sheets(section), *other_sheets(section), *published_sheets(section, papers)]


def quality_sheets(section: Section) -> list[Sheet]:
    """Method × budget for each measure that any pressed run has, and for each set of tokens that it was measured over."""
    return [
        grid_sheet(part, measure, tokens)
        for measure in quality_measures(section)
        for tokens, part in section.over_same_tokens(measure.name)
    ]


def published_sheets(section: Section, papers: Sequence[PaperTable]) -> list[Sheet]:
    """What the papers state for the section's methods."""
    return [_published(section, found) for found in published(section, papers)]


def other_sheets(section: Section) -> list[Sheet]:
    """What caches and answers were like, then memory, speed and what took time; a row an entry."""
    in_replay = any(entry.runs[0].labels["mode"] == "replay" for entry in section.entries)
    # How long answers of a replay are tells nothing: they are a few tokens by design.
    listed = [("Caches", f"means over the samples{_recall(section)}", CACHE)]
    listed += [] if in_replay else [("Answers as texts", "means over the samples", TEXT)]
    listed += [("Memory, as measured", f"means over the samples{_room(section)}", MEMORY)]
    listed += [("Speed, as measured", f"means over the samples{_reused(section)}", SPEED)]
    listed += [("Time of events and indices, as measured", "means over the samples", TIME)]
    return [sheet for caption, note, columns in listed if (sheet := list_sheet(section, caption, note, columns))]


def _recall(section: Section) -> str:
    """That the rows' recalls do not compare, where they do not."""
    apart = len(section.over_same_tokens("mass_recall_worst")) > 1
    return "; recall not over the same tokens for all methods" if apart else ""


def _reused(section: Section) -> str:
    """That the dense model's seconds are those of another run, where they are."""
    reused, known = section.dense_reused
    if not reused:
        return ""
    samples = "all samples" if reused == known else f"{reused} of {known} samples"
    return f"; in {samples} of these rows the dense model was read from an earlier run, with the seconds it took then (reuse_dense)"


def _room(section: Section) -> str:
    """Why a press may seem to store more than the dense model, where one does."""

    def is_misleading(entry: Entry) -> bool:
        def mean(name: str) -> float | None:
            value = entry.value(name)
            if value is None and name.startswith("dense_"):
                value = section.dense(name.removeprefix("dense_"))
            return None if value is None else value.mean

        return only_room_is_larger(mean)

    return f"; where {ROOM_FOR_GROWTH}" if any(map(is_misleading, section.pressed)) else ""


def quality_measures(section: Section) -> list[Metric]:
    """Those that any pressed run of the section has."""
    return [measure for measure in QUALITY if any(entry.value(measure.name) for entry in section.pressed)]


def grid_sheet(section: Section, measure: Metric, tokens: str = "") -> Sheet:
    """Method × budget, the best mean of each budget marked where there is something to compare.

    A budget that never bound tested nothing: its mean is marked as such and never the best.

    Args:
        tokens: over which tokens it was measured, if the other methods of the section have others.
    """
    found = {(entry.method, entry.budget_value): entry.value(measure.name) for entry in section.pressed}
    idle = {(entry.method, entry.budget_value) for entry in section.pressed if entry.never_bound}
    rows, best = [], set()
    tops = {budget: _best(section, budget, measure) for budget, _ in section.budgets}
    for line, method in enumerate(section.methods):
        values = [found.get((method, budget)) for budget, _ in section.budgets]
        cells = [method]
        for column, ((budget, _), value) in enumerate(zip(section.budgets, values), start=1):
            is_idle = (method, budget) in idle
            cells.append(cell(measure, value) + (_IDLE if is_idle and value is not None else ""))
            if value is not None and value.mean == tops[budget] and not is_idle:
                best.add((line, column))
        rows.append((*cells, _counts(values)))
    dense = section.dense(measure.name)
    if dense is not None:
        rows.append(("dense", *[cell(measure, dense)] * len(section.budgets), str(dense.n)))
    note = "mean ± standard error over the n samples" + (f";{_IDLE} the budget never bound" if idle else "")
    return Sheet(
        f"{measure.title}, {tokens}" if tokens else measure.title,
        f"{note}; other methods were measured over other tokens" if tokens else note,
        ("method", *(text for _, text in section.budgets), "n"),
        1,
        tuple(rows),
        frozenset(best),
        frozenset() if dense is None else frozenset({len(rows) - 1}),
    )


def cell(measure: Metric, value: Value | None) -> str:
    """`55.0 % ± 3.1 %`, the standard error behind the mean."""
    if value is None:
        return "–"
    # A spread has no sign, whatever its mean has.
    return measure.write(value.mean) + (f" ± {measure.write(value.error).lstrip('+')}" if value.error else "")


def list_sheet(section: Section, caption: str, note: str, columns: Sequence[Metric]) -> Sheet | None:
    """A row for the dense model and for each entry, with the columns that anybody has; None without any."""
    shown = [
        column
        for column in columns
        if any(_of_entry(entry, column) for entry in section.entries) or _dense(section, column) is not None
    ]
    if not shown:
        return None
    rows = []
    dense = [_dense(section, column) for column in shown]
    if any(dense):
        rows.append(("dense", "", *map(_written, shown, dense), _counts(dense)))
    for entry in section.pressed:
        values = [_of_entry(entry, column) for column in shown]
        if any(values):
            rows.append((entry.method, entry.budget, *map(_written, shown, values), _counts(values)))
    titles = ("method", "budget", *(column.title for column in shown), "n")
    return Sheet(caption, note, titles, 2, tuple(rows), dense=frozenset({0} if any(dense) else ()))


def _best(section: Section, budget: float, measure: Metric) -> float | None:
    """The best mean at a budget that bound, which several entries may share; None with nothing to compare, or if all are
    the same."""
    tested = [entry for entry in section.pressed if entry.budget_value == budget and not entry.never_bound]
    values = [entry.value(measure.name) for entry in tested]
    means = [value.mean for value in values if value is not None]
    return best_mean(measure, means) if len(set(means)) > 1 else None


def _of_entry(entry: Entry, column: Metric) -> Value | None:
    """A peak that both models share says nothing about either."""
    if column.name in SHARED_PEAKS and entry.value(column.dense) is None:
        return None
    return entry.value(column.name)


def _dense(section: Section, column: Metric) -> Value | None:
    return None if column.dense is None else section.dense(column.name)


def _written(column: Metric, value: Value | None) -> str:
    return "–" if value is None else column.write(value.mean)


def _counts(values: Sequence[Value | None]) -> str:
    """Samples behind a row: `6`, or `3–6` where they differ."""
    counts = sorted({value.n for value in values if value is not None})
    if not counts:
        return "–"
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"


def _published(section: Section, found: Published) -> Sheet:
    """The paper's figures beside ours, without a difference, and the dense models' above them."""
    table, name, write = found.table, found.metric.name, found.metric.write
    parts = section.over_same_tokens(name)
    rows = []
    for pair in found.pairs:
        ours = write(pair.entry.value(name).mean)
        tokens = next((words for words, part in parts if pair.entry in part.entries), "")
        ours += f" ({tokens})" if tokens else ""
        rows.append((pair.entry.method, pair.entry.budget, pair.method, written(pair.figure), ours))
    if table.dense is not None:
        ours = parts[0][1].dense(name) if len(parts) == 1 else None
        rows.insert(0, ("dense", "", "dense", written(table.dense), "–" if ours is None else write(ours.mean)))
    return Sheet(
        f"Published: {table.name}",
        f"the paper's: {table.measured}; {written(table.model)}; {table.task}. Another model and other data than here, so that "
        "only the order of methods compares",
        ("method here", "budget here", "in the paper", f"paper: {table.measured}", f"here: {found.metric.title}"),
        3,
        tuple(rows),
        dense=frozenset() if table.dense is None else frozenset({0}),
    )
