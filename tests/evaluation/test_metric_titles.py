"""Metrics have one title each, and the documentation explains all of them under it."""

from pathlib import Path

import pytest

from kvstitch.evaluation.metric_titles import KNOWN_METRICS, known
from kvstitch.evaluation.report.measures import CACHE, MEMORY, QUALITY, SPEED, TEXT, TIME, best_mean
from kvstitch.evaluation.table import ROWS

REPORTS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"


def explained():
    """Metric -> title, from the rows of the documentation's table."""
    text = REPORTS.read_text(encoding="utf-8").partition("## Rows and columns")[2].replace("\\|", "\0")
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    pairs = [
        (name.strip(" `"), title.strip().replace("\0", "|"))
        for titles, names, _ in cells[1:]
        for title, name in zip(titles.split(";"), names.split(","), strict=True)
    ]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


def test_every_title_stands_in_the_documentation():
    assert explained() == {name: metric.title for name, metric in KNOWN_METRICS.items()}


def test_every_metric_is_shown_somewhere_and_titles_differ():
    shown = {*ROWS, *QUALITY, *CACHE, *TEXT, *MEMORY, *SPEED, *TIME}
    assert shown == set(KNOWN_METRICS.values())
    assert len({metric.title for metric in shown}) == len(shown)


def test_how_numbers_are_written_and_what_the_dense_model_has():
    accuracy, kl, stored, resolution = known("accuracy", "kl", "kv_bytes", "resolution")
    assert (accuracy.dense, stored.dense) == ("dense_accuracy", "dense_kv_bytes") and kl.dense is None
    assert (accuracy.percent, kl.percent) == (True, False)
    assert (accuracy.write(0.5), kl.write(0.05), resolution.write(12.345)) == ("50.0 %", "0.0500", "12.3")
    assert [stored.write(size) for size in (10, 2**11, 3.5 * 2**20, 2**31)] == [
        "10.0 B",
        "2.0 KiB",
        "3.5 MiB",
        "2.00 GiB",
    ]


@pytest.mark.parametrize("name", ["kl", "nll_difference", "accuracy", "mean_slots", "modularity"])
def test_what_rounds_to_nothing_has_no_minus(name):
    """Equal models differ by -1.3e-8 nats."""
    (metric,) = known(name)
    assert metric.write(-1.3e-8) == metric.write(0.0) and "-0" not in metric.write(-1.3e-8)
    assert metric.write(-1.0).startswith("-1")


@pytest.mark.parametrize("metric", QUALITY, ids=lambda metric: metric.name)
def test_less_is_better_only_of_divergences(metric):
    assert best_mean(metric, [0.2, 0.1, 0.3]) == (
        0.1 if metric.name in ("kl", "nll", "nll_difference", "perplexity") else 0.3
    )
