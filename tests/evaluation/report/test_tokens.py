"""Means over other tokens stand in tables and charts of their own, each with the dense model's over the same tokens."""

import re

import pytest

from kvstitch.evaluation.paper_tables import PaperRow, PaperTable
from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.charts import budget_charts
from kvstitch.evaluation.report.page import page
from kvstitch.evaluation.report.sheets import published_sheets, quality_sheets, sheets
from kvstitch.evaluation.report.tables import markdown

COMMUNITY = dict(press="community", scorer=None, allocator="community")


def figures(kl, nll, dense_nll, compared):
    metrics = {"kl": kl, "nll": nll, "dense_nll": dense_nll, "nll_difference": nll - dense_nll, "mass_recall": 0.9}
    return {"metrics": metrics | {"mass_recall_worst": 0.5, "compared_tokens": compared}}


@pytest.fixture
def mixed(make_run):
    """Two evicting presses over a trace of 512 tokens and one that retrieves for its last 64."""
    make_run(**figures(0.0005, 4.5772, 4.5768, 511))
    make_run(press="topk", allocator="global_topk", **figures(0.0007, 4.5779, 4.5768, 511))
    return make_run(**COMMUNITY, **figures(0.0, 4.5657, 4.5669, 63)).parent


def by_caption(folder):
    (section,) = sections_of(find_runs([folder])[0])
    return {sheet.caption: sheet for sheet in quality_sheets(section)}


def test_each_set_of_tokens_has_a_table_with_its_own_dense_model_and_its_own_best(mixed):
    found = by_caption(mixed)
    whole, last = (
        found["NLL, nats a token, last 511 tokens of each trace"],
        found["NLL, nats a token, last 63 tokens of each trace"],
    )
    assert [row[:2] for row in whole.rows] == [
        ("ams tova segment_quota", "4.5772"),
        ("topk tova global_topk", "4.5779"),
        ("dense", "4.5768"),
    ]
    assert [row[:2] for row in last.rows] == [("community", "4.5657"), ("dense", "4.5669")]
    assert whole.best == {(0, 1)} and not last.best
    assert "over other tokens" in whole.note
    for metric in ("KL(dense || pressed), nats", "NLL difference", "attention mass recall"):
        assert metric not in found
        assert [row[0] for row in found[f"{metric}, last 63 tokens of each trace"].rows] == ["community"]
    assert found["KL(dense || pressed), nats, last 511 tokens of each trace"].best == {(0, 1)}


def test_answers_memory_and_speed_still_share_their_tables(mixed):
    (section,) = sections_of(find_runs([mixed])[0])
    found = {sheet.caption: sheet for sheet in sheets(section)}
    assert len(found["answers right"].rows) == 4 and len(found["Memory, as measured"].rows) == 4
    assert "recall not over the same tokens for all methods" in found["Caches"].note


def test_a_chart_has_the_lines_and_the_dense_model_of_the_same_tokens(mixed):
    (section,) = sections_of(find_runs([mixed])[0])
    drawn = [svg for svg in budget_charts(section) if 'aria-label="NLL, nats' in svg]
    assert [re.search(r'aria-label="([^"]*)"', svg)[1] for svg in drawn] == [
        "NLL, nats a token, last 511 tokens of each trace",
        "NLL, nats a token, last 63 tokens of each trace",
    ]
    assert "community" not in drawn[0] and "community" in drawn[1] and "ams" not in drawn[1]
    assert re.search(r"dense: 4\.57\d+", drawn[0]) and re.search(r"dense: 4\.566\d*", drawn[1])
    text = page([section], [], "t")
    assert "last 63 tokens of each trace" in text and "last 63 tokens of each trace" in markdown([section])


def test_tables_over_the_same_tokens_are_one_as_ever(make_run):
    make_run(**figures(0.0005, 4.5772, 4.5768, 63))
    folder = make_run(**COMMUNITY, **figures(0.0, 4.5657, 4.5768, 63)).parent
    found = by_caption(folder)
    assert [row[0] for row in found["NLL, nats a token"].rows] == ["ams tova segment_quota", "community", "dense"]
    assert found["KL(dense || pressed), nats"].best


def test_a_run_of_the_dense_model_stands_only_beside_its_own_tokens(make_run):
    """With more samples it would be preferred; here its interval was another one."""
    make_run(**figures(0.1, 2.2, 2.0, 63))
    for seed in (42, 43):
        metrics = {"dense_nll": 3.0 + seed / 100, "compared_tokens": 31}
        folder = make_run(press="dense", scorer=None, allocator=None, seed=seed, metrics=metrics).parent
    assert by_caption(folder)["NLL, nats a token"].rows[-1][:2] == ("dense", "2.0000")


def test_without_a_common_sample_the_interval_tells(make_run):
    """Traces of other seeds may be longer."""
    make_run(seed=1, **figures(0.1, 2.2, 2.0, 63))
    folder = make_run(seed=2, press="topk", allocator="global_topk", **figures(0.2, 2.2, 2.0, 65)).parent
    assert len(by_caption(folder)["KL(dense || pressed), nats"].rows) == 2


def test_a_papers_table_says_over_which_tokens_ours_are(mixed):
    rows = (PaperRow("A", {"press": "ams"}, (1.0,)), PaperRow("C", {"press": "community"}, (2.0,)))
    table = PaperTable("P", "table 1", "m", "t", "NLL", rows, ("nll",), dense=0.5)
    (section,) = sections_of(find_runs([mixed])[0])
    (sheet,) = published_sheets(section, [table])
    # The dense model has no one figure that stands beside both.
    assert [row[-1] for row in sheet.rows] == [
        "–",
        "4.5772 (last 511 tokens of each trace)",
        "4.5657 (last 63 tokens of each trace)",
    ]
