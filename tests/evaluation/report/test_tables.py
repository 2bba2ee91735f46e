"""The numbers of a report: right, complete, the best of a column marked."""

import csv
import io

import pytest
from rich.console import Console

from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.tables import QUALITY, cost_rows, grid, markdown, print_sections, summary_csv


@pytest.fixture
def sections(full_set):
    return sections_of(find_runs([full_set])[0])


KL = next(measure for measure in QUALITY if measure.metric == "kl")


def test_the_best_of_each_budget_is_marked(sections):
    section = sections[0]
    assert [text for _, text in section.budgets] == ["64 tokens", "128 tokens", "256 tokens"]
    rows = dict(grid(section, KL))
    for column, (budget, _) in enumerate(section.budgets):
        means = {method: values[column][0].mean for method, values in rows.items()}
        marked = [method for method, values in rows.items() if values[column][1]]
        assert marked == [min(means, key=means.get)], budget
    # Where nobody competes nobody is the best.
    assert not any(top for _, values in grid(sections[1], KL) for _, top in values)


def test_csv_has_every_metric_of_every_entry(sections):
    lines = list(csv.DictReader(io.StringIO(summary_csv(sections))))
    kl = [line for line in lines if line["metric"] == "kl"]
    assert len(kl) == 10 and {line["seeds"] for line in kl if line["method"].startswith("ams")} == {"2"}
    entry = sections[0].pressed[0]
    (line,) = [
        line
        for line in kl
        if line["method"] == entry.method and line["budget"] == entry.budget and "2048" in line["section"]
    ]
    assert float(line["mean"]) == entry.value("kl").mean and int(line["n"]) == 8
    assert float(line["std_seeds"]) == entry.value("kl").seeds_std and len(line["folders"].split()) == 2
    assert {line["metric"] for line in lines if line["method"] == "dense"} == {
        "dense_accuracy", "dense_kv_bytes", "dense_decode_tokens_per_second",
    }  # fmt: skip


def test_markdown_and_terminal_show_the_same_cells(sections):
    text = markdown(sections)
    table = [line for line in text.splitlines() if line.startswith("| ams")]
    assert any("**" in line for line in text.splitlines())
    output = io.StringIO()
    print_sections(sections, Console(file=output, width=200))
    shown = output.getvalue()
    for value in (entry.value("kl") for entry in sections[0].pressed):
        assert f"{value.mean:.4f}" in text and f"{value.mean:.4f}" in shown
    assert table and "dense" in shown and "needle · tiny · replay · task.length=2048" in shown


def test_memory_and_speed_of_the_dense_model_stand_first(sections):
    titles, rows = cost_rows(sections[0])
    assert titles == ["slots, mean", "KV storage", "tokens/s", "events", "time in events"]
    assert rows[0][:4] == ["dense", "", "1600", "286.1 MiB"] and rows[0][-1] == "–"
    assert rows[1][:4] == ["ams tova segment_quota", "64 tokens", "320", "61.0 MiB"] and len(rows) == 10
