"""The numbers of a report in the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstitch.evaluation.paper_tables import PaperTable
from kvstitch.evaluation.report.entries import Entry, Value
from kvstitch.evaluation.report.notes import warnings
from kvstitch.evaluation.report.published import PAPER_COLUMNS, paper_cells, paper_json, published
from kvstitch.evaluation.report.runs import Problem, grouped
from kvstitch.evaluation.report.sections import Section
from kvstitch.evaluation.report.sheets import Sheet, sheets

LEFT_OUT = "Not in this report"
# What stands beside a cell that is the best of its column.
_STAR = "*"


def print_sections(
    sections: Sequence[Section],
    console: Console,
    problems: Sequence[Problem] = (),
    papers: Sequence[PaperTable] = (),
) -> None:
    """Every table of every section, the best of a column in bold and with a star; then the runs that are in none."""
    for section in sections:
        console.print(f"\n{section.title}", style="bold", markup=False)
        console.print(section.samples, markup=False, highlight=False)
        for line in warnings(section):
            console.print(f"! {line}", style="bold red", markup=False, highlight=False)
        for sheet in sheets(section, papers):
            console.print(_terminal_table(sheet))
    if problems:
        console.print(f"\n{LEFT_OUT}", style="bold")
        for reason, names in grouped(problems):
            console.print(f"{reason}: {', '.join(names)}", markup=False, highlight=False)


def _terminal_table(sheet: Sheet) -> Table:
    table = Table(title=f"{sheet.caption} ({sheet.note})", title_justify="left", title_style="")
    for place, title in enumerate(sheet.columns):
        # A narrow terminal folds long names; cut short they would be alike.
        table.add_column(title, justify="left" if place < sheet.text_columns else "right", overflow="fold")
    for line, row in enumerate(sheet.rows):
        cells = [
            Text(words + _STAR, style="bold") if (line, place) in sheet.best else Text(words)
            for place, words in enumerate(row)
        ]
        table.add_row(*cells, style="dim" if line in sheet.dense else "")
    return table


def markdown(sections: Sequence[Section], problems: Sequence[Problem] = (), papers: Sequence[PaperTable] = ()) -> str:
    """The same for a README."""
    lines: list[str] = []
    for section in sections:
        lines += [f"## {section.title}", "", section.samples, ""]
        lines += [f"Options: {section.options}", ""] if section.options else []
        lines += [*(f"- {line}" for line in found), ""] if (found := warnings(section)) else []
        for sheet in sheets(section, papers):
            lines += [*_markdown_table(sheet), ""]
    if problems:
        lines += [f"## {LEFT_OUT}", ""]
        lines += [f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in grouped(problems)] + [
            ""
        ]
    return "\n".join(lines)


def _markdown_table(sheet: Sheet) -> list[str]:
    note = f"{sheet.note}; best of each column in bold" if sheet.best else sheet.note
    rule = ["---" if place < sheet.text_columns else "---:" for place in range(len(sheet.columns))]
    lines = [f"{sheet.caption} ({note})", "", _row(sheet.columns), _row(rule)]
    for line, row in enumerate(sheet.rows):
        lines.append(
            _row([f"**{words}**" if (line, place) in sheet.best else words for place, words in enumerate(row)])
        )
    return lines


def summary_csv(sections: Sequence[Section], papers: Sequence[PaperTable] = ()) -> str:
    """One line an entry and metric, everything that was measured.

    Columns: section, method, budget, metric, n (samples), mean, std over samples, seeds, std over seeds' means, folders; with
    papers also `PAPER_COLUMNS`, on the line of the metric that a paper's figure stands beside.
    """
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    columns = ["section", "method", "budget", "metric", "n", "mean", "std_samples", "seeds", "std_seeds", "folders"]
    writer.writerow([*columns, *(PAPER_COLUMNS if papers else ())])
    for section in sections:
        found = published(section, papers)
        for entry in section.entries:
            for metric, value in _values(entry):
                folders = " ".join(run.name for run in entry.runs)
                row = [section.title, entry.method, entry.budget, metric, *_numbers(value).values(), folders]
                writer.writerow([*row, *(paper_cells(found, entry, metric) if papers else ())])
    return output.getvalue()


def summary_json(
    sections: Sequence[Section], problems: Sequence[Problem] = (), papers: Sequence[PaperTable] = ()
) -> str:
    """The same for programs: `metrics.json` of all seeds together, and what else the tables say.

    `sections`, each with `title`, `task`, `model`, `mode` and `entries`; an entry has `method`, `budget`, `budget_value`
    (None for the dense model), `seeds`, `folders`, `repeats` (runs of further seeds that computed the same and do not count:
    `seed`, `folder`, `same_as`), `samples`, `bound_samples` (None for the dense model) and `metrics`, of each of which `n`,
    `mean`, `std_samples`, `seeds` and `std_seeds`. With papers a section also has `published`, see
    `paper_json`. `not_in_report`: `folder` and `reason`.
    """
    content = {
        "sections": [
            _section(section) | ({"published": paper_json(published(section, papers))} if papers else {})
            for section in sections
        ],
        "not_in_report": [{"folder": problem.path.name, "reason": problem.reason} for problem in problems],
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _section(section: Section) -> dict[str, Any]:
    labels = section.entries[0].runs[0].labels
    return {
        "title": section.title,
        **{name: labels[name] for name in ("task", "model", "mode")},
        "entries": [
            {
                "method": entry.method,
                "budget": entry.budget,
                "budget_value": entry.budget_value,
                "seeds": [run.config["seed"] for run in entry.runs],
                "folders": [run.name for run in entry.runs],
                "repeats": [
                    {"seed": run.config["seed"], "folder": run.name, "same_as": kept.name}
                    for run, kept in entry.repeats
                ],
                "samples": sum(len(run.records) for run in entry.runs),
                "bound_samples": None if entry.bound is None else entry.bound[0],
                "metrics": {metric: _numbers(value) for metric, value in _values(entry)},
            }
            for entry in section.entries
        ],
    }


def _values(entry: Entry) -> Iterator[tuple[str, Value]]:
    """Every metric that any sample has."""
    for metric in dict.fromkeys(name for run in entry.runs for name in run.summary["metrics"]):
        value = entry.value(metric)
        if value is not None:
            yield metric, value


def _numbers(value: Value) -> dict[str, float | int | None]:
    return {
        "n": value.n,
        "mean": value.mean,
        "std_samples": value.std,
        "seeds": value.seeds,
        "std_seeds": value.seeds_std,
    }


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"
