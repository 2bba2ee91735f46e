"""Papers' figures stand beside our rows where method and budget are the same, in every output, and as nobody else's."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from kvstitch.evaluation.paper_reading import paper_tables
from kvstitch.evaluation.paper_records import record_tables
from kvstitch.evaluation.paper_tables import written
from kvstitch.evaluation.records import RunFolder, write_text
from kvstitch.evaluation.report import find_runs, papers_of, sections_of, write_report
from kvstitch.evaluation.report.published import PAPER_COLUMNS, published
from kvstitch.evaluation.report.sheets import published_sheets
from kvstitch.evaluation.report.tables import print_sections, summary_csv, summary_json

AMS = {"credit": True, "quota": "waterfill", "segment_mass": 0.1}


def table(name):
    (found,) = [table for table in paper_tables() if name in table.name]
    return found


def pairs(section, name):
    """Method, budget, the paper's name and its figure, of one table beside a section."""
    return [
        (pair.entry.method, pair.entry.budget, pair.method, written(pair.figure))
        for found in published(section, [table(name)])
        for pair in found.pairs
    ]


def only_section(folder):
    (section,) = sections_of(find_runs([folder])[0])
    return section


def test_figures_stand_beside_ours_where_method_and_budget_match(make_run):
    for budget in (128, 256, 512):
        make_run(budget=budget, allocator="segment_quota", leaves=AMS)
        folder = make_run(press="topk", allocator="global_topk", budget=budget).parent
    section = only_section(folder)
    ams, topk = "ams tova segment_quota", "topk tova global_topk"
    # The paper has no 128 here.
    assert pairs(section, "tables 1 and 5") == [
        (ams, "256 tokens", "AMS-TOVA", "36.4"),
        (ams, "512 tokens", "AMS-TOVA", "48.4"),
        (topk, "256 tokens", "TOVA", "29.2"),
        (topk, "512 tokens", "TOVA", "44.6"),
    ]
    (sheet,) = published_sheets(section, [table("tables 1 and 5")])
    mean = {(entry.method, entry.budget): f"{100 * entry.value('accuracy').mean:.1f} %" for entry in section.pressed}
    assert sheet.columns[3:] == ("paper: pass@1, %", "here: answers right")
    assert sheet.rows[0] == ("dense", "", "dense", "52.8", f"{100 * section.dense('accuracy').mean:.1f} %")
    assert [row[-1] for row in sheet.rows[1:]] == [mean[row[:2]] for row in sheet.rows[1:]]


def test_an_ablation_is_not_taken_for_the_method_itself(make_run):
    for change in ({}, {"credit": False}, {"quota": "length"}):
        folder = make_run(allocator="segment_quota_paper", budget=512, leaves=AMS | change).parent
    section = only_section(folder)
    assert {row[2]: row[0].partition("(")[2] for row in pairs(section, "table 7")} == {
        "full": "",
        "without EMA credit": "credit=False)",
        "without mass quotas": "quota=length)",
    }
    assert not pairs(section, "tables 1 and 5")


def test_another_resolution_is_not_the_papers_row(make_run):
    leaves = {"partition": "leiden", "direct_weight": 0.5, "sinks_in_graph": False, "aggregation": "query_group"}
    for top_k, resolution in ((8, 1.0), (8, 32.0), (2, 1.0)):
        folder = make_run(
            press="community", scorer=None, allocator="community_paper",
            leaves=leaves | {"top_k": top_k, "resolution": resolution},
        ).parent  # fmt: skip
    shown = {(row[0].partition("(")[2], row[2], row[3]) for row in pairs(only_section(folder), "ablation with 4,096")}
    assert {name for name, *_ in shown if "32" in name} == set()
    assert {row[1:] for row in shown} == {("default", "32.0"), ("one graph a query group", "31.8"), ("κ = 2", "30.3")}


def test_several_models_stand_in_one_cell(make_run):
    leaves = {"partition": "leiden", "top_k": 8, "direct_weight": 0.5, "sinks_in_graph": False}
    for allocator in ("community", "pages"):
        folder = make_run(press="community", scorer=None, allocator=allocator, budget=128, leaves=leaves).parent
    (sheet,) = published_sheets(only_section(folder), [table("LongBench v2")])
    assert [row[2:4] for row in sheet.rows] == [
        ("dense", "27.4 / 31.4 / 32.0"),
        ("CommunityKV", "25.4 / 28.5 / 30.2"),
        ("Quest", "0.2 / 5.6 / 9.3"),
    ]
    assert "Qwen3-4B / Qwen3-8B / Qwen3-14B" in sheet.note


def test_what_is_about_another_kind_of_task_stays_away(make_run):
    for task in ("needle", "text"):
        folder = make_run(task=task, scorer="expected_e2", leaves=AMS).parent
    rows = {section.title[:4]: pairs(section, "table 6, NIAH") for section in sections_of(find_runs([folder])[0])}
    assert not rows["text"] and [row[2:] for row in rows["need"]] == [("AMS-Expected", "0.2209")]


def test_memory_and_seconds_of_adakv_stand_beside_the_mask_alone(make_run):
    measured = {"kv_bytes": 9, "seconds": 2.0}
    for allocator in ("head_adaptive", "head_adaptive_mask"):
        make_run(press="topk", scorer="expected_e2", allocator=allocator, budget=512, metrics=measured)
    folder = make_run(
        press="topk", scorer="streaming_llm", allocator="global_topk", budget=512, metrics=measured
    ).parent
    for name, figure in (("table 8, memory", "39.6"), ("table 8, time", "62.3")):
        rows = pairs(only_section(folder), name)
        assert [(row[0].split()[2], row[3]) for row in rows if row[2] == "AdaKV-ExpE2"] == [
            ("head_adaptive_mask", figure)
        ]


def test_the_small_variant_of_the_backbones_has_its_figures_beside_it(make_run):
    section = only_section(make_run(task="reasoning", scorer="expected_e2", budget=512, leaves=AMS))
    for name, figures in (("OpenThinker3", ["45.8", "45.4"]), ("32B", ["47.8", "43.0"])):
        (sheet,) = published_sheets(section, [table(name)])
        assert [row[3] for row in sheet.rows] == figures


def test_a_table_with_one_known_method_of_many_is_left_out_unless_the_run_brought_it(make_run):
    folder = make_run(press="topk", allocator="global_topk")
    assert not pairs(only_section(folder), "tables 1 and 5")
    record_tables(RunFolder(folder), [table("tables 1 and 5")])
    assert pairs(only_section(folder), "tables 1 and 5") == [
        ("topk tova global_topk", "256 tokens", "TOVA", "29.2"),
    ]


def test_what_a_run_recorded_is_shown_and_needs_no_configuration(make_run):
    folder = make_run(press="topk", allocator="global_topk")
    known = table("tables 1 and 5")
    own, right = replace(known, table="of nowhere"), replace(known, dense=99.9)
    record_tables(RunFolder(folder), [own, right])
    runs, _ = find_runs([folder])
    papers = papers_of(runs)
    assert own in papers and right in papers and known not in papers
    assert [found.table for found in published(only_section(folder), papers)] == [right, own]


def test_shards_bring_what_any_of_them_has(make_run):
    folders = [make_run(shard=shard, num_shards=2) for shard in (0, 1)]
    record_tables(RunFolder(folders[1]), [table("table 7")])
    (run,), problems = find_runs(folders)
    assert run.papers == (table("table 7"),) and not problems


def test_a_damaged_record_costs_the_run_nothing_else(make_run):
    folder = make_run()
    write_text(folder / "paper.json", "{")
    (run,), (problem,) = find_runs([folder])
    assert run.path == folder == problem.path and not run.papers and "paper.json is damaged" in problem.reason


@pytest.fixture
def both(make_run, tmp_path):
    """Sections with TOVA and AMS-TOVA at two budgets, of which the paper has one, and the papers beside them."""
    for budget in (128, 256):
        folder = make_run(budget=budget, allocator="segment_quota", leaves=AMS)
        make_run(press="topk", allocator="global_topk", budget=budget)
    record_tables(RunFolder(folder), [table("tables 1 and 5")])
    runs, problems = find_runs([folder.parent])
    assert not problems
    return sections_of(runs), papers_of(runs)


LABELS = ("AMS (arXiv 2605.23200), tables 1 and 5", "DeepSeek-R1-Distill-Qwen-7B", "Math500", "pass@1, %")


def test_terminal_markdown_and_page_say_whose_figures_they_are(both, tmp_path):
    sections, papers = both
    output = io.StringIO()
    print_sections(sections, Console(file=output, width=200), papers=papers)
    write_report(tmp_path / "out", sections, papers=papers)
    texts = [output.getvalue(), *((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))]
    for text in texts:
        # A terminal wraps a caption.
        words = re.sub(r"\s+", " ", text)
        for label in (*LABELS, "paper: pass@1, %", "here: answers right", "only the order of methods compares"):
            assert label in words, label
        # The dense model's, and both methods' at the one budget of both.
        for figure in ("52.8", "29.2", "36.4"):
            assert len(re.findall(rf"(?<![\d.]){re.escape(figure)}(?![\d.]| %)", words)) == 1, figure


def test_nothing_of_a_paper_is_shown_where_none_is_asked_for(both, tmp_path):
    sections, _ = both
    write_report(tmp_path / "out", sections)
    for name in ("report.md", "report.html", "summary.csv", "summary.json"):
        text = (tmp_path / "out" / name).read_text()
        assert "pass@1" not in text and "paper" not in text and "ublished" not in text, name


def test_the_csv_has_figures_on_the_line_of_the_metric_beside_which_they_stand(both):
    sections, papers = both
    lines = list(csv.DictReader(io.StringIO(summary_csv(sections, papers))))
    stated = [line for line in lines if any(line[column] for column in PAPER_COLUMNS)]
    assert {(line["method"], line["budget"], line["metric"], line["paper_method"], line["paper_figure"]) for line in stated} == {
        ("ams tova segment_quota", "256 tokens", "accuracy", "AMS-TOVA", "36.4"),
        ("topk tova global_topk", "256 tokens", "accuracy", "TOVA", "29.2"),
    }  # fmt: skip
    for line in stated:
        others = [line[column] for column in PAPER_COLUMNS if column not in ("paper_method", "paper_figure")]
        assert others == [LABELS[0], LABELS[1], LABELS[2], "pass@1", "%", "52.8"]
    plain = [{key: value for key, value in line.items() if key not in PAPER_COLUMNS} for line in lines]
    assert plain == list(csv.DictReader(io.StringIO(summary_csv(sections))))


def test_the_csv_joins_the_figures_of_two_tables(make_run):
    folder = make_run(allocator="segment_quota_paper", budget=512, leaves=AMS)
    papers = [table("tables 1 and 5"), table("table 7")]
    record_tables(RunFolder(folder), papers)
    lines = csv.DictReader(io.StringIO(summary_csv([only_section(folder)], papers)))
    (line,) = [line for line in lines if line["paper_figure"]]
    assert (line["paper_method"], line["paper_figure"]) == ("AMS-TOVA | full", "48.4 | 48.4")
    assert line["paper_dense"] == "52.8 | " and line["paper_source"].endswith(
        "tables 1 and 5 | AMS (arXiv 2605.23200), table 7"
    )


def test_the_json_has_the_numbers(both):
    sections, papers = both
    (section,) = json.loads(summary_json(sections, papers=papers))["sections"]
    (found,) = section["published"]
    rows = found.pop("rows")
    assert found == {
        "source": "AMS (arXiv 2605.23200)", "table": "tables 1 and 5", "model": LABELS[1], "task": LABELS[2],
        "metric": "pass@1", "unit": "%", "dense": 52.8, "beside": "accuracy",
    }  # fmt: skip
    assert [(row["method"], row["budget"], row["paper_method"], row["figure"]) for row in rows] == [
        ("ams tova segment_quota", "256 tokens", "AMS-TOVA", 36.4),
        ("topk tova global_topk", "256 tokens", "TOVA", 29.2),
    ]
    assert "published" not in json.loads(summary_json(sections))["sections"][0]
