"""What a section's numbers look like: quality and cost against budget, and needles by depth and length."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from kvstitch.evaluation.metric_titles import KNOWN_METRICS
from kvstitch.evaluation.report.line_chart import LineChart, Series
from kvstitch.evaluation.report.runs import Run
from kvstitch.evaluation.report.sections import Section
from kvstitch.evaluation.report.sheets import quality_measures
from kvstitch.evaluation.report.svg import COLOURS, HeatMap

_DEPTH_BINS, _MOST_ROWS = 10, 12
# Metric, name of the axis's unit where the title has none, what one unit is.
_COST = (("kv_bytes", ", MiB", 2**20), ("decode_tokens_per_second", "", 1))


def budget_charts(section: Section) -> list[str]:
    """Every quality measure against the budget, with the dense line and standard errors; then memory and speed."""
    drawn = []
    for measure in quality_measures(section):
        for tokens, part in section.over_same_tokens(measure.name):
            drawn += _charts(part, measure.name, measure.title, percent=measure.percent, tokens=tokens)
    for metric, name, unit in _COST:
        drawn += _charts(section, metric, KNOWN_METRICS[metric].title + name, unit)
    return drawn


def _charts(
    section: Section, metric: str, title: str, unit: float = 1, percent: bool = False, tokens: str = ""
) -> list[str]:
    """One chart, or several if there are more methods than can be told apart."""
    series = []
    for method in section.methods:
        points = [
            (entry.budget_value, value.mean / unit, None if value.error is None else value.error / unit)
            for entry in section.pressed
            if entry.method == method and (value := entry.value(metric)) is not None
        ]
        if points:
            series.append(Series(method, points))
    dense = section.dense(metric)
    most = len(COLOURS)
    in_tokens = all(text.endswith(" tokens") for _, text in section.budgets)
    drawn = []
    for start in range(0, len(series), most):
        shown = series[start : start + most]
        used = {x for line in shown for x, _, _ in line.points}
        chart = LineChart(
            f"{title}, {tokens}" if tokens else title,
            "budget, tokens a kv head" if in_tokens else "budget",
            title,
            [(value, f"{value:g}" if in_tokens else text) for value, text in section.budgets if value in used],
            shown,
            percent,
            None if dense is None else ("dense", dense.mean / unit),
            # Neither a divergence nor a size is below nothing, however wide its error bar; a difference can be.
            (-math.inf if metric == "nll_difference" else 0, 1 if percent else math.inf),
        )
        drawn.append(chart.draw())
    return drawn


def needle_maps(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """For each method and budget how often a needle was found, by its depth and the length of the text.

    Drawn from the `depth` among the facts about each sample or question; sections that differ in the length alone stand side by side.

    Returns:
        The sections' title and the picture, of the dense model first.
    """
    cells: dict[tuple[str, str, str], dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for section in sections:
        for entry in section.entries:
            place = f"{entry.runs[0].labels['task']} · {entry.runs[0].labels['model']} · {entry.runs[0].labels['mode']}"
            for run in entry.runs:
                if entry.budget_value is not None:
                    _collect(run, "pressed", cells[(place, entry.method, entry.budget)])
                _collect(run, "dense", cells[(place, "dense", "")])
    found = {key: value for key, value in cells.items() if value}
    ordered = sorted(found, key=lambda key: (key[0], key[1] != "dense"))
    return [(key[0], _needle_map(f"{key[1]} {key[2]}".strip(), found[key])) for key in ordered]


def _collect(run: Run, side: str, into: dict[tuple[float, int], list[float]]) -> None:
    for record in run.records:
        for answer in record.get("answers", ()):
            facts = {**record["meta"], **answer["meta"]}
            if facts.get("depth") is None or side not in answer:
                continue
            length = facts.get("length") or run.config["task"].get("length") or record["context_tokens"]
            into[(facts["depth"], length)].append(answer[side]["score"])


def _needle_map(name: str, cells: dict[tuple[float, int], list[float]]) -> str:
    """Rows are the depths as they are if they make a grid, else tenths of the text."""
    depths = sorted({depth for depth, _ in cells})
    rows = [f"{100 * depth:g} %" for depth in depths]
    if len(depths) > _MOST_ROWS or not _make_a_grid(depths):
        depths = list(range(_DEPTH_BINS))
        rows = [f"{100 * row // _DEPTH_BINS}–{100 * (row + 1) // _DEPTH_BINS} %" for row in depths]
        binned: dict[tuple[float, int], list[float]] = defaultdict(list)
        for (depth, length), scores in cells.items():
            binned[(min(int(depth * _DEPTH_BINS), _DEPTH_BINS - 1), length)] += scores
        cells = binned
    lengths = sorted({length for _, length in cells})
    values = [
        [statistics.fmean(scores) if (scores := cells.get((row, length))) else None for length in lengths]
        for row in depths
    ]
    return HeatMap(
        f"Needles found: {name}", "tokens of the text", "depth", list(map(str, lengths)), rows, values
    ).draw()


def _make_a_grid(depths: Sequence[float]) -> bool:
    """Whether depths were asked for and not drawn: whole percents, or evenly spaced."""
    whole = all(abs(100 * depth - round(100 * depth)) < 1e-6 for depth in depths)
    gaps = [right - left for left, right in zip(depths, depths[1:])]
    return whole or len(gaps) > 1 and max(gaps) - min(gaps) < 1e-6
