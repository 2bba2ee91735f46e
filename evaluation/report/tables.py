"""The numbers of a report as a terminal table, CSV and Markdown."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvstitch.evaluation.report.sections import Entry, Section, Value
from kvstitch.evaluation.table import write_bytes


@dataclass(frozen=True)
class Measure:
    """A metric that methods are ranked by.

    Args:
        metric: its name in `metrics.json`.
        title: for readers.
        higher: whether more is better.
        percent: whether it is a share.
    """

    metric: str
    title: str
    higher: bool
    percent: bool = False

    def write(self, number: float) -> str:
        """As readers see it."""
        return f"{100 * number:.1f} %" if self.percent else f"{number:.4f}"


QUALITY = (
    Measure("accuracy", "answers right", higher=True, percent=True),
    Measure("pass_at_k", "at least one of the samples right", higher=True, percent=True),
    Measure("kl", "KL(dense || pressed), nats", higher=False),
    Measure("top1_agreement", "top-1 agreement", higher=True, percent=True),
    Measure("nll", "NLL, nats a token", higher=False),
    Measure("mass_recall", "attention mass recall", higher=True, percent=True),
)
# Column, metric of the pressed model, metric of the dense one, how to write it.
COST = (
    ("slots, mean", "mean_slots", "dense_mean_slots", "{:.0f}".format),
    ("slots, peak", "peak_slots", "dense_peak_slots", "{:.0f}".format),
    ("KV storage", "kv_bytes", "dense_kv_bytes", write_bytes),
    ("beside it", "auxiliary_bytes", None, write_bytes),
    ("process, peak", "peak_process_bytes", "dense_peak_process_bytes", write_bytes),
    ("GPU, peak", "peak_device_bytes", "dense_peak_device_bytes", write_bytes),
    ("prefill, s", "prefill_seconds", "dense_prefill_seconds", "{:.2f}".format),
    ("tokens/s", "decode_tokens_per_second", "dense_decode_tokens_per_second", "{:.1f}".format),
    ("events", "events", None, "{:.1f}".format),
    ("time in events", "event_time_share", None, lambda share: f"{100 * share:.1f} %"),
)


def quality_measures(section: Section) -> list[Measure]:
    """Those that any pressed run of the section has."""
    return [measure for measure in QUALITY if any(entry.value(measure.metric) for entry in section.pressed)]


def best(section: Section, budget: float, measure: Measure) -> float | None:
    """The best mean at a budget, which several entries may share; None with nothing to compare."""
    values = [e.value(measure.metric) for e in section.pressed if e.budget_value == budget]
    means = [value.mean for value in values if value is not None]
    return (max if measure.higher else min)(means) if len(means) > 1 else None


def grid(section: Section, measure: Measure) -> list[tuple[str, list[tuple[Value | None, bool]]]]:
    """Method × budget: for each method a value and whether it is the best of its column, in the order of budgets."""
    found = {(entry.method, entry.budget_value): entry.value(measure.metric) for entry in section.pressed}
    bests = {number: best(section, number, measure) for number, _ in section.budgets}
    rows = []
    for method in section.methods:
        values = [(found.get((method, number)), bests[number]) for number, _ in section.budgets]
        rows.append((method, [(value, value is not None and value.mean == top) for value, top in values]))
    return rows


def cell(measure: Measure, value: Value | None) -> str:
    """`55.0 % ± 3.1 %`, the standard error behind the mean."""
    if value is None:
        return "–"
    return measure.write(value.mean) + (f" ± {measure.write(value.error)}" if value.error else "")


def print_sections(sections: Sequence[Section], console: Console) -> None:
    """Method × budget for each measure, the best of a column in bold and with a star."""
    for section in sections:
        console.print(f"\n{section.title}", style="bold", markup=False)
        for measure in quality_measures(section):
            table = Table(title=f"{measure.title} (± standard error)", title_justify="left", title_style="")
            table.add_column("method")
            for _, text in section.budgets:
                table.add_column(text, justify="right")
            for method, values in grid(section, measure):
                cells = [cell(measure, value) for value, _ in values]
                marked = [f"[bold]{text} *[/bold]" if top else text for text, (_, top) in zip(cells, values)]
                table.add_row(method, *marked)
            dense = section.dense(measure.metric)
            if dense is not None:
                table.add_row("dense", *[cell(measure, dense)] * len(section.budgets), style="dim")
            console.print(table)


def markdown(sections: Sequence[Section]) -> str:
    """The same for a README."""
    lines: list[str] = []
    for section in sections:
        lines += [f"## {section.title}", ""]
        for measure in quality_measures(section):
            lines += [f"{measure.title} (mean ± standard error over the samples; best of each column in bold)", ""]
            lines += [_row(["method", *(text for _, text in section.budgets)])]
            lines += [_row(["---", *["---:"] * len(section.budgets)])]
            for method, values in grid(section, measure):
                cells = [cell(measure, value) for value, _ in values]
                lines += [_row([method, *(f"**{text}**" if top else text for text, (_, top) in zip(cells, values))])]
            dense = section.dense(measure.metric)
            if dense is not None:
                lines += [_row(["dense", *[cell(measure, dense)] * len(section.budgets)])]
            lines += [""]
        lines += _cost_lines(section)
    return "\n".join(lines)


def _cost_lines(section: Section) -> list[str]:
    titles, rows = cost_rows(section)
    lines = ["Memory and speed, as measured (means over the samples)", "", _row(["method", "budget", *titles])]
    lines += [_row(["---", "---", *["---:"] * len(titles)])]
    return lines + [_row(row) for row in rows] + [""]


def cost_rows(section: Section) -> tuple[list[str], list[list[str]]]:
    """Titles of the columns that anybody has, and a row for the dense model and for each entry."""
    columns = [
        (title, pressed, dense, write)
        for title, pressed, dense, write in COST
        if any(entry.value(pressed) for entry in section.entries) or (dense is not None and _dense(section, dense))
    ]
    rows = []
    if any(dense and _dense(section, dense) for _, _, dense, _ in columns):
        values = [_dense(section, dense) if dense else None for _, _, dense, _ in columns]
        rows.append(["dense", "", *_written(columns, values)])
    for entry in section.pressed:
        values = [entry.value(pressed) for _, pressed, _, _ in columns]
        rows.append([entry.method, entry.budget, *_written(columns, values)])
    return [title for title, *_ in columns], rows


def _dense(section: Section, metric: str) -> Value | None:
    name = metric.removeprefix("dense_")
    # What replay measures of both sides together belongs to the dense model only where it ran alone.
    alone = [entry for entry in section.entries if entry.budget_value is None]
    return section.dense(name) or (alone[0].value(name) if alone else None)


def _written(columns: Sequence[tuple], values: Sequence[Value | None]) -> list[str]:
    return ["–" if value is None else write(value.mean) for (_, _, _, write), value in zip(columns, values)]


def summary_csv(sections: Sequence[Section]) -> str:
    """One line an entry and metric, everything that was measured.

    Columns: section, method, budget, metric, n (samples), mean, std over samples, seeds, std over seeds' means, folders.
    """
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(
        ["section", "method", "budget", "metric", "n", "mean", "std_samples", "seeds", "std_seeds", "folders"]
    )
    for section in sections:
        for entry in section.entries:
            for metric in _metrics(entry):
                value = entry.value(metric)
                if value is not None:
                    numbers = [value.n, value.mean, value.std, value.seeds, value.seeds_std]
                    folders = " ".join(run.name for run in entry.runs)
                    writer.writerow([section.title, entry.method, entry.budget, metric, *numbers, folders])
    return output.getvalue()


def _metrics(entry: Entry) -> list[str]:
    return list(dict.fromkeys(name for run in entry.runs for name in run.summary["metrics"]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"
