"""Needles stand in the cell of their depth and length, whether the sample or the question knows them."""

import re

import pytest

from kvstitch.evaluation.report import Run
from kvstitch.evaluation.report.charts import needle_maps
from kvstitch.evaluation.report.sections import sections_of

LABELS = {"press": "dense", "task": "needle_grid", "model": "tiny", "mode": "replay"}


def run_of(tmp_path, facts):
    """A dense run; `facts` are depth, length and score of each sample's needle."""
    records = [
        {
            "id": str(index), "meta": {"depth": depth, "length": length}, "context_tokens": length - 7, "metrics": {},
            "answers": [{"gold": [], "meta": {}, "dense": {"score": score}}],
        }
        for index, (depth, length, score) in enumerate(facts)
    ]  # fmt: skip
    config = {"model": {}, "task": {}, "mode": "replay", "seed": 1}
    summary = {"run": LABELS, "metrics": {}, "budget_bound": None, "failed_samples": {}}
    return Run(tmp_path, config, summary, records, {"sessions": []})


def shown(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def test_a_grid_has_a_row_for_each_depth_and_a_column_for_each_length(tmp_path):
    facts = [(0.0, 512, 1.0), (0.5, 512, 0.0), (1.0, 512, 1.0), (0.0, 1024, 0.0), (0.0, 1024, 1.0)]
    ((place, svg),) = needle_maps(sections_of([run_of(tmp_path, facts)]))
    assert place == "needle_grid · tiny · replay"
    assert shown(svg)[:10] == [
        "Needles found: dense",
        "0 %",
        "100 %",
        "50 %",
        "50 %",
        "0 %",
        "–",
        "100 %",
        "100 %",
        "–",
    ]
    assert shown(svg)[10:12] == ["512", "1024"]


@pytest.mark.parametrize("count", [12, 40])
def test_many_depths_become_tenths(tmp_path, count):
    facts = [(index / count, 512, float(index % 2)) for index in range(count)]
    ((_, svg),) = needle_maps(sections_of([run_of(tmp_path, facts)]))
    ticks = [text for text in shown(svg) if "–" in text]
    assert len(ticks) == (0 if count == 12 else 10)


@pytest.mark.parametrize("depths", [(0.1231, 0.2387), (0.1, 0.1231, 0.7)])
def test_depths_that_were_drawn_become_tenths_however_few(tmp_path, depths):
    ((_, svg),) = needle_maps(sections_of([run_of(tmp_path, [(depth, 512, 1.0) for depth in depths])]))
    assert shown(svg)[1] == "0–10 %" and "12.31 %" not in shown(svg)
    assert shown(svg).count("100 %") == len({int(10 * depth) for depth in depths})
