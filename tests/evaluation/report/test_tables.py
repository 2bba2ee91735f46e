"""The numbers of a report: right, complete, the best of a column marked."""

import csv
import io
import json
import math
import re
import statistics

import pytest
from rich.console import Console

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import Problem, find_runs, sections_of
from kvstitch.evaluation.report.measures import MEMORY, QUALITY, SPEED, TIME
from kvstitch.evaluation.report.page import page
from kvstitch.evaluation.report.sheets import grid_sheet, list_sheet
from kvstitch.evaluation.report.tables import markdown, print_sections, summary_csv, summary_json


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
    # In replay both models share the process: its peak says nothing about either.
    assert memory.columns == ("method", "budget", *slots, *storage, "held beside it, peak", "n")
    assert memory.rows[0] == ("dense", "", "1600", "–", "–", "286.1 MiB", "–", "8") and memory.dense == {0}
    assert memory.rows[1][:4] == ("ams tova segment_quota", "64 tokens", "320", "576")
    assert memory.rows[1][4:] == ("54.9 MiB", "61.0 MiB", "28.6 MiB", "8") and len(memory.rows) == 10
    assert speed.columns == ("method", "budget", "prefill, s", "decoded tokens/s", "n")
    assert speed.rows[0][:3] == ("dense", "", "–") and speed.rows[1][2] == "1.50"


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
    assert line.startswith("Memory, as measured (means over the samples; where KV storage")


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


def test_peaks_are_shown_where_each_model_had_its_own(make_run):
    """kvpress's presses generate, too, but beside the dense model."""
    peaks = {"peak_process_bytes": 2**30, "peak_device_bytes": 3 * 2**30}
    apart = {f"dense_{name}": value / 2 for name, value in peaks.items()}
    make_run(mode="generate", metrics=peaks | apart)
    folder = make_run(mode="generate", press="kvpress", metrics=peaks).parent
    (section,) = sections_of(find_runs([folder])[0])
    memory = list_sheet(section, "", "", MEMORY)
    assert memory.columns[-3:] == ("process, peak", "GPU memory, peak", "n")
    assert {row[0]: row[-3:-1] for row in memory.rows} == {
        "dense": ("512.0 MiB", "1.50 GiB"),
        "ams tova segment_quota": ("1.00 GiB", "3.00 GiB"),
        "kvpress tova segment_quota": ("–", "–"),
    }
    # Nothing that was measured is lost.
    assert "peak_process_bytes" in summary_csv([section])


def test_json_joins_what_the_metrics_of_each_run_hold(make_run):
    folders = [make_run(seed=seed, bound=3, failed=("s0",)) for seed in (1, 2)]
    make_run(press="dense", scorer=None, allocator=None, seed=1)
    broken = make_run(budget=8)
    (broken / "metrics.json").unlink()
    runs, problems = find_runs([broken.parent])
    content = json.loads(summary_json(sections_of(runs), problems))
    assert content["not_in_report"] == [{"folder": broken.name, "reason": "not finished; give its command again"}]
    (section,) = content["sections"]
    assert (section["task"], section["model"], section["mode"]) == ("needle", "tiny", "replay")
    dense, entry = section["entries"]
    assert (dense["method"], dense["budget_value"], dense["bound_samples"]) == ("dense", None, None)
    assert entry["method"] == "ams tova segment_quota" and (entry["budget"], entry["budget_value"]) == (
        "256 tokens",
        256.0,
    )
    assert entry["seeds"] == [1, 2] and entry["folders"] == [folder.name for folder in folders]
    # Of three samples a seed that are not failed two bound.
    assert (entry["samples"], entry["bound_samples"]) == (8, 4)
    own = [json.loads((folder / "metrics.json").read_text())["metrics"] for folder in folders]
    assert entry["metrics"].keys() == own[0].keys()
    kl, each = entry["metrics"]["kl"], [metrics["kl"] for metrics in own]
    assert (kl["n"], kl["seeds"]) == (6, 2)
    assert kl["mean"] == pytest.approx(statistics.fmean(one["mean"] for one in each))
    assert kl["std_seeds"] == pytest.approx(statistics.stdev(one["mean"] for one in each))
    assert kl["std_samples"] > 0


@pytest.mark.parametrize("bound", [True, False])
def test_a_budget_that_never_bound_is_marked_and_never_the_best(make_run, bound):
    """Whoever evicts nothing agrees with the dense model best."""
    make_run(metrics={"kl": 0.3})
    make_run(press="topk", allocator="global_topk", metrics={"kl": 0.2})
    folder = make_run(press="new", bound=bound, metrics={"kl": 0.0}).parent
    (section,) = sections_of(find_runs([folder])[0])
    sheet = grid_sheet(section, KL)
    (best,) = sheet.best
    assert sheet.rows[best[0]][0].split()[0] == ("new" if bound else "topk")
    cells = {row[0].split()[0]: row[1] for row in sheet.rows}
    assert cells == {"ams": "0.3000", "topk": "0.2000", "new": "0.0000" if bound else "0.0000 †"}
    assert ("† the budget never bound" in sheet.note) is not bound


def test_who_never_bound_does_not_share_the_first_place(make_run):
    for press, kl in (("ams", 0.2), ("topk", 0.3)):
        make_run(press=press, allocator=press, metrics={"kl": kl})
    folder = make_run(press="new", bound=False, metrics={"kl": 0.2}).parent
    (section,) = sections_of(find_runs([folder])[0])
    sheet = grid_sheet(section, KL)
    assert [sheet.rows[line][0].split()[0] for line, _ in sheet.best] == ["ams"]


def test_nobody_is_the_best_beside_budgets_that_never_bound(make_run):
    make_run(metrics={"kl": 0.3})
    folder = make_run(press="new", bound=False, metrics={"kl": 0.4}).parent
    (section,) = sections_of(find_runs([folder])[0])
    assert not grid_sheet(section, KL).best


def test_in_how_many_samples_a_budget_bound_is_said_over_all_seeds(make_run):
    folders = [make_run(seed=seed, bound=bound) for seed, bound in ((1, 3), (2, False), (3, True))]
    (section,) = sections_of(find_runs(folders)[0])
    assert section.entries[0].bound == (7, 12) and not section.entries[0].never_bound
    line = "ams tova segment_quota, 256 tokens: the budget bound in 7 of 12 samples; in the others nothing was evicted"
    assert line in markdown([section])
    assert "the budget" not in markdown(sections_of(find_runs([folders[2]])[0]))


def test_perplexity_stands_where_nothing_is_asked(make_run):
    """That of the whole text: exp of the mean over its pieces, which are equally long."""
    values = {"s0": 2.0, "s1": 3.0, "s2": 2.5, "s3": 2.1}
    metrics = lambda sample: {"nll": values[sample], "dense_nll": values[sample] - 1}
    folder = make_run(asked=False, metrics=metrics)
    (run,), _ = find_runs([folder])
    (section,) = sections_of([run])
    value, dense = section.entries[0].value("perplexity"), section.dense("perplexity")
    assert value.mean == pytest.approx(math.exp(2.4)) and dense.mean == pytest.approx(math.exp(1.4))
    assert value.std == pytest.approx(math.exp(2.4) * statistics.stdev(values.values())) and value.n == 4
    assert run.summary["metrics"]["perplexity"] == pytest.approx({"n": 4, "mean": value.mean, "std": value.std})
    assert run.summary["metrics"]["dense_perplexity"]["mean"] == pytest.approx(dense.mean)
    assert "perplexity (mean ± standard error" in markdown([section]) and "| dense | 4.06" in markdown([section])
    asked = make_run(budget=64, metrics=metrics)
    (run,), _ = find_runs([asked])
    assert "perplexity" not in run.summary["metrics"] and sections_of([run])[0].entries[0].value("perplexity") is None


def test_perplexity_has_no_number_beyond_all_bounds(make_run):
    (run,), _ = find_runs([make_run(asked=False, metrics={"nll": 800.0})])
    assert run.summary["metrics"]["perplexity"] == {"n": 4, "mean": None, "std": None}
    assert "perplexity" not in markdown(sections_of([run]))


def everywhere(sections):
    """Terminal, Markdown and HTML."""
    output = io.StringIO()
    print_sections(sections, Console(file=output, width=250))
    return [output.getvalue(), markdown(sections), page(sections, [], "t")]


def test_what_took_time_has_a_table_with_the_columns_that_anybody_has(make_run):
    make_run(metrics={"event_seconds": 0.0125})
    retrieval = {"index_seconds": 0.25, "exposed_seconds": 0.05, "observe_seconds": 0.5, "background_seconds": 0.75}
    folder = make_run(press="community", allocator="community", metrics=retrieval | {"event_seconds": 0.5}).parent
    sections = sections_of(find_runs([folder])[0])
    time = list_sheet(sections[0], "", "", TIME)
    titles = ("events a sample", "seconds an event", "time in events", "seconds for edges", "seconds for indices")
    rest = ("… waiting for the background", "seconds in the background")
    assert time.columns == ("method", "budget", *titles, *rest, "n")
    assert [row[2:-1] for row in time.rows] == [
        ("3.0", "0.013", "3.0 %", "–", "–", "–", "–"),
        ("3.0", "0.500", "3.0 %", "0.50", "0.25", "0.05", "0.75"),
    ]
    for text in everywhere(sections):
        assert "Time of events and indices, as measured" in text and "0.013" in text and "0.75" in text
    alone = list_sheet(sections_of(find_runs([make_run(budget=64)])[0])[0], "", "", TIME)
    assert alone.columns == ("method", "budget", "events a sample", "time in events", "n")


def test_the_difference_of_nll_has_its_table_and_the_least_is_the_best(make_run):
    # 0.02 on average; a spread has no sign.
    make_run(metrics=lambda sample: {"nll_difference": 0.01 * int(sample[1]) + 0.005})
    folder = make_run(press="topk", allocator="global_topk", metrics={"nll_difference": -0.01}).parent
    sections = sections_of(find_runs([folder])[0])
    html = everywhere(sections)[2]
    for text in everywhere(sections):
        assert "NLL difference" in text and "+0.0200 ± 0.0065" in text and "-0.0100" in text
    assert '<td class="best">-0.0100 ★</td>' in html
    (chart,) = re.findall(r'<svg [^>]*aria-label="NLL difference".*?</svg>', html, re.DOTALL)
    # Below nothing the axis goes on.
    assert re.search(r'text-anchor="end"[^>]*>-0\.01', chart)


@pytest.mark.parametrize(
    "first, second, samples",
    [(0.0, 0.0, None), (0.0, 1.0, "in 4 of 8 samples of"), (1.0, 1.0, "in all samples of"), (None, None, None)],
)
def test_seconds_of_the_dense_model_from_an_earlier_run_are_named_as_such(make_run, first, second, samples):
    known = lambda reused: {} if reused is None else {"dense_reused": reused}
    make_run(metrics=known(first))
    folder = make_run(budget=64, metrics=known(second)).parent
    for text in everywhere(sections_of(find_runs([folder])[0])):
        # A terminal breaks lines.
        text = " ".join(text.split())
        assert ("read from an earlier run, with the seconds it took then" in text) is (samples is not None)
        assert samples is None or f"; {samples} these rows the dense model was read" in text


def test_the_dense_model_stands_once_whatever_the_budget(make_run):
    """Its run does not see budgets, scorers and allocators; its seeds do count."""
    for budget, reused in ((64, 1.0), (128, 0.0), (256, 1.0)):
        make_run(press="dense", scorer=None, allocator=None, budget=budget, seed=1, metrics={"dense_reused": reused})
    make_run(press="dense", scorer=None, allocator=None, budget=64, seed=2)
    make_run(
        press="dense", scorer="keydiff", allocator="segment_quota", budget=64, seed=2, leaves={"segment_mass": 0.2}
    )
    folder = make_run(budget=64, seed=1).parent
    (section,) = sections_of(find_runs([folder])[0])
    dense, pressed = section.entries
    assert (dense.method, dense.budget) == ("dense", "") and pressed.method == "ams tova segment_quota"
    assert [run.config["seed"] for run in dense.runs] == [1, 2]
    # The run with seconds of its own stands for those that read them.
    assert dense.runs[0].config["budget"] == 128 and dense.value("dense_accuracy").n == 8
    lines = list(csv.DictReader(io.StringIO(summary_csv([section]))))
    assert len([line for line in lines if line["method"] == "dense" and line["metric"] == "dense_accuracy"]) == 1
    # Methods are still told apart by what they see, and the dense model by what it sees.
    make_run(press="dense", scorer=None, allocator=None, seed=1, config={"task.depth": 2})
    assert len(sections_of(find_runs([folder])[0])) == 2


def test_of_dense_runs_one_whose_samples_failed_does_not_stand_for_the_others(make_run):
    make_run(press="dense", scorer=None, allocator=None, budget=64, failed=("s0",))
    folder = make_run(press="dense", scorer=None, allocator=None, budget=128).parent
    (section,) = sections_of(find_runs([folder])[0])
    (dense,) = section.entries
    assert dense.value("dense_accuracy").n == 4
