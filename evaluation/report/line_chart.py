"""Lines over a common axis that differ in colour, marker and dash, with error bars and a level line to compare with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvstitch.evaluation.metric_titles import fixed
from kvstitch.evaluation.report.svg import (
    COLOURS,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    dash,
    frame,
    marker,
    nice_ticks,
    picture,
    text,
)

_HEIGHT, _BOTTOM = 330, 50
_LINE_SPREAD = 5


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        label: for the legend.
        points: x, y and the half length of the error bar or None, by x.
    """

    label: str
    points: Sequence[tuple[float, float, float | None]]


@dataclass(frozen=True)
class LineChart:
    """Lines over a common axis.

    Args:
        title: says what is drawn.
        x_title, y_title: with units.
        x_ticks: value and text of each.
        series: at most as many as colours, markers and dashes tell apart.
        percent: whether the heights are shares, written as percent.
        reference: label and height of a level line, e.g. the dense model's.
        limits: what the y axis never goes beyond, whatever an error bar would want: nothing is more than 100 % right. What
            lies outside, as a divergence rounded to -1e-8, is drawn on the limit.
    """

    title: str
    x_title: str
    y_title: str
    x_ticks: Sequence[tuple[float, str]]
    series: Sequence[Series]
    percent: bool = False
    reference: tuple[str, float] | None = None
    limits: tuple[float, float] = (-math.inf, math.inf)

    def draw(self) -> str:
        """The picture as an `<svg>` element."""
        x, y, steps = self._axes()
        y_ticks = [(step, self._written(step, steps)) for step in steps]
        legend = len(self.series) + (self.reference is not None)
        parts = [frame(x, y, self.x_ticks, y_ticks, self.x_title, self.y_title)]
        if self.reference is not None:
            height = y(self._within(self.reference[1]))
            parts.append(
                f'<path d="M{LEFT} {height}H{WIDTH - RIGHT}" stroke="#555" stroke-width="1.5" stroke-dasharray="5 4"/>'
            )
        parts += [self._line(index, series, x, y, steps) for index, series in enumerate(self.series)]
        parts += [self._legend_line(index, series.label) for index, series in enumerate(self.series)]
        if self.reference is not None:
            height = _HEIGHT + 18 * len(self.series) + 6
            parts.append(f'<path d="M{LEFT} {height}h34" stroke="#555" stroke-width="1.5" stroke-dasharray="5 4"/>')
            label, value = self.reference
            parts.append(text(LEFT + 42, height + 4, f"{label}: {self._written(value, steps, more=1)}"))
        return picture(self.title, WIDTH, _HEIGHT + 18 * legend + 10, parts)

    def _written(self, value: float, steps: Sequence[float], more: int = 0) -> str:
        """With as many decimals as tell neighbouring ticks apart, or `more`."""
        scale = 100 if self.percent else 1
        decimals = max(0, -math.floor(math.log10(scale * (steps[1] - steps[0])) + 1e-9)) + more
        return fixed(scale * value, decimals) + (" %" if self.percent else "")

    def _within(self, height: float) -> float:
        low, high = self.limits
        return min(max(height, low), high)

    def _axes(self) -> tuple[Axis, Axis, list[float]]:
        heights = [
            y + sign * (error or 0) for series in self.series for _, y, error in series.points for sign in (-1, 1)
        ]
        heights += [] if self.reference is None else [self.reference[1]]
        if sum(len(series.points) for series in self.series) == 1 and self.reference is None:
            # With nothing to compare a point with, a cut axis would show no more than its error bar.
            heights += [limit for limit in self.limits if math.isfinite(limit)]
        heights = list(map(self._within, heights))
        low, high = self.limits
        steps = [step for step in nice_ticks(min(heights), max(heights)) if low <= step <= high]
        y = Axis(steps[0], steps[-1], _HEIGHT - _BOTTOM, TOP)
        places = [value for value, _ in self.x_ticks]
        low, high = min(places), max(places)
        logarithmic = low > 0 and high / low >= 4
        if low == high:
            low, high = low * 0.5, low * 1.5
        margin = 24
        x = Axis(low, high, LEFT + margin, WIDTH - RIGHT - margin, logarithmic)
        return x, y, steps

    def _line(self, index: int, series: Series, x: Axis, y: Axis, steps: Sequence[float]) -> str:
        colour = COLOURS[index % len(COLOURS)]
        # Lines that lie on each other would look like one: each stands a little beside its neighbours.
        shift = (index - (len(self.series) - 1) / 2) * self._spread(x)
        path = "M" + "L".join(f"{x(px) + shift:g} {y(self._within(py)):g}" for px, py, _ in series.points)
        parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash(index)}/>']
        for px, py, error in series.points:
            left = x(px) + shift
            note = f"{series.label} at {px:g}: {self._written(py, steps, 1)}"
            note += f" ± {self._written(error, steps, 1)}" if error else ""
            if error:
                low, high = (y(self._within(end)) for end in (py - error, py + error))
                caps = f"M{left - 4:g} {low}h8M{left - 4:g} {high}h8"
                parts.append(f'<path d="M{left:g} {low}V{high}{caps}" stroke="{colour}" fill="none"/>')
            parts.append(f"<g>{marker(index, left, y(self._within(py)))}<title>{escape(note)}</title></g>")
        return "".join(parts)

    def _spread(self, x: Axis) -> float:
        """Pixels between neighbouring lines, so that all of them stay nearer to their own tick than to the next."""
        places = sorted(x(value) for value, _ in self.x_ticks)
        gap = min((right - left for left, right in zip(places, places[1:])), default=WIDTH)
        return min(_LINE_SPREAD, 0.5 * gap / len(self.series))

    def _legend_line(self, index: int, label: str) -> str:
        height = _HEIGHT + 18 * index + 6
        line = f'<path d="M{LEFT} {height}h34" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"{dash(index)}/>'
        return line + marker(index, LEFT + 17, height) + text(LEFT + 42, height + 4, label)
