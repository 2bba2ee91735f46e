"""Papers' figures are data that hold together, and stand beside our rows where method and budget are the same."""

from pathlib import Path

import pytest
import yaml

from kvstitch.evaluation.report import find_runs, paper_tables, sections_of
from kvstitch.evaluation.report.published import PAPERS, published_rows

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def table(name):
    (found,) = [table for table in paper_tables() if name in table.name]
    return found


def test_figures_stand_beside_ours_where_method_and_budget_match(make_run):
    for budget in (128, 256, 512):
        make_run(
            budget=budget, allocator="segment_quota", leaves={"credit": True, "quota": "waterfill", "segment_mass": 0.1}
        )
        folder = make_run(press="topk", allocator="global_topk", budget=budget).parent
    (section,) = sections_of(find_runs([folder])[0])
    title, rows = published_rows(section, table("tables 1 and 5"))
    mean = {(entry.method, entry.budget): f"{100 * entry.value('accuracy').mean:.1f} %" for entry in section.pressed}
    assert title == "answers right"
    assert rows[0] == ("dense", "", "dense", "52.8", f"{100 * section.dense('accuracy').mean:.1f} %")
    ams, topk = "ams tova segment_quota", "topk tova global_topk"
    # The paper has no 128 here.
    assert rows[1:] == [
        (ams, "256 tokens", "AMS-TOVA", "36.4", mean[ams, "256 tokens"]),
        (ams, "512 tokens", "AMS-TOVA", "48.4", mean[ams, "512 tokens"]),
        (topk, "256 tokens", "TOVA", "29.2", mean[topk, "256 tokens"]),
        (topk, "512 tokens", "TOVA", "44.6", mean[topk, "512 tokens"]),
    ]


def test_an_ablation_is_not_taken_for_the_method_itself(make_run):
    leaves = {"credit": True, "quota": "waterfill", "segment_mass": 0.1}
    for change in ({}, {"credit": False}, {"quota": "length"}):
        folder = make_run(allocator="segment_quota_paper", budget=512, leaves=leaves | change).parent
    (section,) = sections_of(find_runs([folder])[0])
    _, rows = published_rows(section, table("table 7"))
    assert {row[2]: row[0].partition("(")[2] for row in rows} == {
        "full": "",
        "without EMA credit": "credit=False)",
        "without mass quotas": "quota=length)",
    }
    assert published_rows(section, table("tables 1 and 5")) == ("", [])


def test_several_models_stand_in_one_cell(make_run):
    leaves = {"partition": "leiden", "top_k": 8, "direct_weight": 0.5, "sinks_in_graph": False}
    for allocator in ("community", "pages"):
        folder = make_run(press="community", scorer=None, allocator=allocator, budget=128, leaves=leaves).parent
    (section,) = sections_of(find_runs([folder])[0])
    _, rows = published_rows(section, table("LongBench v2"))
    assert [row[2:4] for row in rows] == [
        ("dense", "27.4 / 31.4 / 32.0"),
        ("CommunityKV", "25.4 / 28.5 / 30.2"),
        ("Quest", "0.2 / 5.6 / 9.3"),
    ]


def test_what_is_about_another_kind_of_task_stays_away(make_run):
    leaves = {"credit": True, "quota": "waterfill", "segment_mass": 0.1}
    for task in ("needle", "text"):
        folder = make_run(task=task, scorer="expected_e2", leaves=leaves).parent
    rows = {
        section.title[:4]: published_rows(section, table("table 6, NIAH"))[1]
        for section in sections_of(find_runs([folder])[0])
    }
    assert not rows["text"] and [row[2:4] for row in rows["need"]] == [("dense", "0.3751"), ("AMS-Expected", "0.2209")]


def test_memory_and_seconds_of_adakv_stand_beside_the_mask_alone(make_run):
    for allocator in ("head_adaptive", "head_adaptive_mask"):
        folder = make_run(
            press="topk", scorer="expected_e2", allocator=allocator, budget=512, metrics={"kv_bytes": 9, "seconds": 2.0}
        ).parent
    make_run(
        press="topk",
        scorer="streaming_llm",
        allocator="global_topk",
        budget=512,
        metrics={"kv_bytes": 9, "seconds": 2.0},
    )
    (section,) = sections_of(find_runs([folder])[0])
    for name, figure in (("table 8, memory", "39.6"), ("table 8, time", "62.3")):
        _, rows = published_rows(section, table(name))
        assert [(row[0].split()[2], row[3]) for row in rows if row[2] == "AdaKV-ExpE2"] == [
            ("head_adaptive_mask", figure)
        ]


def test_the_small_variant_of_the_backbones_has_its_figures_beside_it(make_run):
    leaves = {"credit": True, "quota": "waterfill", "segment_mass": 0.1}
    folder = make_run(task="reasoning", scorer="expected_e2", budget=512, leaves=leaves).parent
    (section,) = sections_of(find_runs([folder])[0])
    for name, figures in (("OpenThinker3", ["45.8", "45.4"]), ("32B", ["47.8", "43.0"])):
        assert [row[3] for row in published_rows(section, table(name))[1]] == figures


def test_partitions_and_seconds_of_free_answers_are_known():
    rows = {row.name: row.values for row in table("partition of the graph").rows}
    assert rows == {
        "Leiden": ((27.4, 31.1, 32.0),),
        "connected components": ((20.3, 21.8, 27.0),),
        "top-k neighbourhoods": ((18.2, 26.2, 29.6),),
    }
    assert [(row.name, row.values) for row in table("table 9, time").rows] == [
        ("TOVA", (67.34,)),
        ("AMS-TOVA", (63.85,)),
    ]


def test_a_table_with_one_known_method_of_many_is_left_out(make_run):
    (section,) = sections_of(find_runs([make_run(press="topk", allocator="global_topk")])[0])
    assert published_rows(section, table("tables 1 and 5")) == ("", [])


def test_every_table_has_an_experiment_and_every_match_a_choice():
    known = {
        group: {path.stem for path in (CONFIGS / group).glob("*.yaml")} for group in ("press", "scorer", "allocator")
    }
    for paper in paper_tables():
        assert any((CONFIGS / "experiment").glob(f"{paper.experiment}*")), paper.name
        for row in paper.rows:
            for group, choices in known.items():
                wanted = row.match.get(group, [])
                assert {wanted} <= choices if isinstance(wanted, str) else set(wanted) <= choices, (
                    paper.name,
                    row.name,
                )
            for leaf in row.match:
                group, _, name = leaf.partition(".")
                assert not name or any(
                    name in yaml.safe_load(path.read_text()) for path in (CONFIGS / group).glob("*.yaml")
                )


def test_a_row_with_too_few_values_is_refused(tmp_path, monkeypatch):
    text = (PAPERS / "ams.yaml").read_text()
    (tmp_path / "ams.yaml").write_text(text.replace("[29.2, 44.6, 48.8]", "[29.2, 44.6]"))
    monkeypatch.setattr("kvstitch.evaluation.report.published.PAPERS", tmp_path)
    with pytest.raises(ValueError, match="TOVA must have one value for each of 3 budgets"):
        paper_tables.__wrapped__()
