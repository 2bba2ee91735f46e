"""The numbers of a report: right, complete, the best of a column marked."""

import csv
import io
import json

import pytest
from rich.console import Console

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import Problem, find_runs, sections_of
from kvstitch.evaluation.report.measures import MEMORY, QUALITY, SPEED
from kvstitch.evaluation.report.sheets import grid_sheet, list_sheet
from kvstitch.evaluation.report.tables import markdown, print_sections, summary_csv


@pytest.fixture
def sections(full_set):
    return sections_of(find_runs([full_set])[0])


KL = next(measure for measure in QUALITY if measure.name == "kl")


def test_the_best_of_each_budget_is_marked_and_n_stands_at_the_end(sections):
    section = sections[0]
    assert [text for _, text in section.budgets] == ["64 tokens", "128 tokens", "256 tokens"]
    sheet = grid_sheet(section, KL)
    assert sheet.columns == ("method", "64 tokens", "128 tokens", "256 tokens", "n")
    for column, (budget, _) in enumerate(section.budgets, start=1):
        means = {entry.method: entry.value("kl").mean for entry in section.pressed if entry.budget_value == budget}
        marked = [sheet.rows[line][0] for line, place in sheet.best if place == column]
        assert marked == [min(means, key=means.get)], budget
    # Two seeds of four samples each, and one.
    assert {row[0]: row[-1] for row in sheet.rows} == {
        "ams tova segment_quota": "8",
        "community": "4",
        "topk keydiff global_topk": "4",
    }
    # Where nobody competes nobody is the best.
    assert not grid_sheet(sections[1], KL).best


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
    assert table and "dense" in shown and "needle · tiny · replay · length=2048" in shown


def test_memory_and_speed_of_the_dense_model_stand_first(sections):
    memory, speed = (list_sheet(sections[0], "cost", "", columns) for columns in (MEMORY, SPEED))
    slots, storage = ("slots a kv head, mean", "slots a kv head, peak"), ("KV storage, mean", "KV storage, peak")
    assert memory.columns == ("method", "budget", *slots, *storage, "held beside it, peak", "process, peak", "n")
    assert memory.rows[0] == ("dense", "", "1600", "–", "–", "286.1 MiB", "–", "–", "8") and memory.dense == {0}
    assert memory.rows[1][:4] == ("ams tova segment_quota", "64 tokens", "320", "576")
    assert memory.rows[1][4:] == ("54.9 MiB", "61.0 MiB", "28.6 MiB", "1.86 GiB", "8") and len(memory.rows) == 10
    assert speed.columns == (
        "method",
        "budget",
        "prefill, s",
        "decoded tokens/s",
        "events a sample",
        "time in events",
        "n",
    )
    assert speed.rows[0][:3] == ("dense", "", "–") and speed.rows[1][4:] == ("3.0", "3.0 %", "8")


@pytest.mark.parametrize("own", [True, False], ids=["its own dense side", "another entry's"])
def test_storage_that_is_larger_only_for_its_room_is_explained(make_run, own):
    note = "where KV storage is larger than the dense model's although no more slots are stored"
    folder = make_run()
    other = make_run(press="dense", scorer=None, allocator=None)

    def change(folder, metrics):
        path = folder / "predictions.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            known = record["metrics"] | metrics
            record["metrics"] = {name: value for name, value in known.items() if value is not None}
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))

    dense = {"dense_kv_bytes": 3e8, "dense_peak_slots": 2048}
    change(folder, dict.fromkeys(dense))
    change(folder if own else other, dense)
    assert note not in markdown(sections_of(find_runs([folder.parent])[0]))
    change(folder, {"kv_bytes": 4e8, "peak_slots": 768})
    (line,) = [line for line in markdown(sections_of(find_runs([folder.parent])[0])).splitlines() if note in line]
    assert line.startswith("Memory, as measured (means over the samples; process and GPU hold both models together; ")


def test_markdown_says_how_many_samples_and_ends_with_what_is_left_out(sections, tmp_path):
    problems = [Problem(tmp_path / name, "failed: disk full") for name in ("a", "b")]
    text = markdown(sections, problems)
    assert "4 to 8 samples an entry; seeds 1, 2." in text and "| n |" in text
    assert text.rstrip().endswith("## Not in this report\n\n- failed: disk full: `a`, `b`")
    output = io.StringIO()
    print_sections(sections, Console(file=output, width=200), problems)
    shown = output.getvalue()
    assert shown.rstrip().endswith("failed: disk full: a, b") and "Not in this report" in shown
    assert "Not in this report" not in markdown(sections)


def test_cells_that_hold_markup_are_shown_as_they_are(make_run):
    (section,) = sections_of(find_runs([make_run(task="a[b]c")])[0])
    output = io.StringIO()
    print_sections([section], Console(file=output, width=200))
    assert "a[b]c" in output.getvalue()


def test_what_a_reader_must_not_miss_is_said_everywhere(make_run):
    make_run(budget=32, bound=False)
    folder = make_run(budget=16, failed=("s1",)).parent
    sections = sections_of(find_runs([folder])[0])
    output = io.StringIO()
    print_sections(sections, Console(file=output, width=200))
    for text in (markdown(sections), output.getvalue()):
        assert "ams tova segment_quota, 32 tokens: the budget never bound, so the press was not tested" in text
        assert "ams tova segment_quota, 16 tokens: failed samples count in no figure (s1)" in text


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_no_name_short(sections, width):
    output = io.StringIO()
    print_sections(sections, Console(file=output, width=width))
    assert "…" not in output.getvalue()
    assert max(map(len, output.getvalue().splitlines())) <= width
