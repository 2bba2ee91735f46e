"""Scalable pictures as text: axes, lines that differ in colour, marker and dash, cells, and raster images inside them."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

# Okabe and Ito's palette, told apart by the colour-blind; its yellow is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus")
_WIDTH, _HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 34, 50
_HEAT_LEFT = 92


@dataclass(frozen=True)
class Axis:
    """From values to pixels.

    Args:
        low, high: ends of the axis, different from each other.
        start, stop: their pixels.
        logarithmic: whether equal factors are equal distances.
    """

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        move = math.log if self.logarithmic else float
        share = (move(value) - move(self.low)) / (move(self.high) - move(self.low))
        return round(self.start + share * (self.stop - self.start), 2)


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
        write: how a number of the y axis is written.
        reference: label and height of a level line, e.g. the dense model's.
    """

    title: str
    x_title: str
    y_title: str
    x_ticks: Sequence[tuple[float, str]]
    series: Sequence[Series]
    write: Callable[[float], str] = "{:g}".format
    reference: tuple[str, float] | None = None

    def draw(self) -> str:
        """The picture as an `<svg>` element."""
        x, y, y_ticks = self._axes()
        legend = len(self.series) + (self.reference is not None)
        parts = [frame(x, y, self.x_ticks, y_ticks, self.x_title, self.y_title)]
        if self.reference is not None:
            height = y(self.reference[1])
            parts.append(
                f'<path d="M{_LEFT} {height}H{_WIDTH - _RIGHT}" stroke="#555" stroke-width="1.5" stroke-dasharray="5 4"/>'
            )
        parts += [self._line(index, series, x, y) for index, series in enumerate(self.series)]
        parts += [self._legend_line(index, series.label) for index, series in enumerate(self.series)]
        if self.reference is not None:
            height = _HEIGHT + 18 * len(self.series) + 6
            parts.append(f'<path d="M{_LEFT} {height}h34" stroke="#555" stroke-width="1.5" stroke-dasharray="5 4"/>')
            parts.append(text(_LEFT + 42, height + 4, f"{self.reference[0]}: {self.write(self.reference[1])}"))
        return picture(self.title, _WIDTH, _HEIGHT + 18 * legend + 10, parts)

    def _axes(self) -> tuple[Axis, Axis, list[tuple[float, str]]]:
        heights = [
            y + sign * (error or 0) for series in self.series for _, y, error in series.points for sign in (-1, 1)
        ]
        heights += [] if self.reference is None else [self.reference[1]]
        steps = nice_ticks(min(heights), max(heights))
        y = Axis(steps[0], steps[-1], _HEIGHT - _BOTTOM, _TOP)
        places = [value for value, _ in self.x_ticks]
        low, high = min(places), max(places)
        logarithmic = low > 0 and high / low >= 4
        if low == high:
            low, high = low * 0.5, low * 1.5
        margin = 24
        x = Axis(low, high, _LEFT + margin, _WIDTH - _RIGHT - margin, logarithmic)
        return x, y, [(step, self.write(step)) for step in steps]

    def _line(self, index: int, series: Series, x: Axis, y: Axis) -> str:
        colour = COLOURS[index % len(COLOURS)]
        path = "M" + "L".join(f"{x(px)} {y(py)}" for px, py, _ in series.points)
        parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{_dash(index)}/>']
        for px, py, error in series.points:
            note = f"{series.label} at {px:g}: {self.write(py)}" + (f" ± {self.write(error)}" if error else "")
            if error:
                left, low, high = x(px), y(py - error), y(py + error)
                parts.append(
                    f'<path d="M{left} {low}V{high}M{left - 4} {low}h8M{left - 4} {high}h8" stroke="{colour}"/>'
                )
            parts.append(f"<g>{marker(index, x(px), y(py))}<title>{escape(note)}</title></g>")
        return "".join(parts)

    def _legend_line(self, index: int, label: str) -> str:
        height = _HEIGHT + 18 * index + 6
        line = (
            f'<path d="M{_LEFT} {height}h34" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"{_dash(index)}/>'
        )
        return line + marker(index, _LEFT + 17, height) + text(_LEFT + 42, height + 4, label)


@dataclass(frozen=True)
class HeatMap:
    """Cells with their numbers in them, so that nobody needs the colours.

    Args:
        title: says what is drawn.
        x_title, y_title: of the columns and rows.
        columns, rows: texts of the ticks.
        values: rows of cells in [0, 1]; None where there is nothing.
    """

    title: str
    x_title: str
    y_title: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]
    cell: tuple[int, int] = field(default=(64, 24))

    def draw(self) -> str:
        """The picture as an `<svg>` element."""
        wide, high = self.cell
        right, bottom = _HEAT_LEFT + wide * len(self.columns), _TOP + high * len(self.rows)
        parts = []
        for row, numbers in enumerate(self.values):
            parts.append(text(_HEAT_LEFT - 6, _TOP + high * row + high / 2 + 4, self.rows[row], anchor="end"))
            for column, number in enumerate(numbers):
                left, top = _HEAT_LEFT + wide * column, _TOP + high * row
                fill = "#fff" if number is None else shade(number)
                ink = "#fff" if number is not None and number > 0.55 else "#000"
                parts.append(f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="{fill}" stroke="#fff"/>')
                words = "–" if number is None else f"{100 * number:.0f} %"
                parts.append(text(left + wide / 2, top + high / 2 + 4, words, anchor="middle", fill=ink))
        for column, words in enumerate(self.columns):
            parts.append(text(_HEAT_LEFT + wide * (column + 0.5), bottom + 16, words, anchor="middle"))
        parts.append(text((_HEAT_LEFT + right) / 2, bottom + 36, self.x_title, anchor="middle"))
        parts.append(upright(14, (_TOP + bottom) / 2, self.y_title))
        width = max(right + _RIGHT, 9 * len(self.title))
        return picture(self.title, width, bottom + 46, parts)


def picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """An `<svg>` element with its title above."""
    head = text(8, 20, title, weight="bold", size=14)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg {size} role="img" aria-label="{escape(title)}">{head}{"".join(parts)}</svg>'


def frame(
    x: Axis,
    y: Axis,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    x_title: str,
    y_title: str,
) -> str:
    """Axes with ticks, light lines across, and titles."""
    left, right = min(x.start, _LEFT), max(x.stop, _WIDTH - _RIGHT)
    parts = []
    for value, words in y_ticks:
        parts.append(f'<path d="M{left} {y(value)}H{right}" stroke="#ddd"/>')
        parts.append(text(left - 6, y(value) + 4, words, anchor="end"))
    for value, words in x_ticks:
        parts.append(f'<path d="M{x(value)} {y.start}v5" stroke="#333"/>')
        parts.append(text(x(value), y.start + 19, words, anchor="middle"))
    parts.append(f'<path d="M{left} {y.stop}V{y.start}H{right}" fill="none" stroke="#333"/>')
    parts.append(text((left + right) / 2, y.start + 39, x_title, anchor="middle"))
    parts.append(upright(14, (y.start + y.stop) / 2, y_title))
    return "".join(parts)


def text(
    x: float, y: float, words: str, anchor: str = "start", fill: str = "#000", weight: str = "normal", size: int = 12
) -> str:
    """A `<text>` element."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}" font-size="{size}">'
        f"{escape(words)}</text>"
    )


def upright(x: float, y: float, words: str) -> str:
    """A title that reads upwards."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="12" transform="rotate(-90 {x:g} {y:g})">'
        f"{escape(words)}</text>"
    )


def marker(index: int, x: float, y: float) -> str:
    """The mark of a series; filled ones and open ones, so that no two of the first twelve are alike."""
    colour = COLOURS[index % len(COLOURS)]
    shape = MARKERS[index % len(MARKERS)]
    fill = colour if index % (2 * len(MARKERS)) < len(MARKERS) else "#fff"
    style = f'fill="{fill}" stroke="{colour}" stroke-width="1.5"'
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="4.5" {style}/>'
    if shape == "square":
        return f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8" {style}/>'
    if shape == "triangle":
        return f'<path d="M{x} {y - 5}l5 9h-10z" {style}/>'
    if shape == "diamond":
        return f'<path d="M{x} {y - 6}l5 6l-5 6l-5 -6z" {style}/>'
    strokes = "l8 8m0 -8l-8 8" if shape == "cross" else "m4 -1v10m-5 -5h10"
    return f'<path d="M{x - 4} {y - 4}{strokes}" fill="none" stroke="{colour}" stroke-width="2.5"/>'


def _dash(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def shade(value: float) -> str:
    """From white at 0 to dark blue at 1; its lightness alone tells the value, in print, too."""
    red, green, blue = (round(255 + value * (end - 255)) for end in (8, 48, 107))
    return f"#{red:02x}{green:02x}{blue:02x}"


def raster(pixels: np.ndarray, x: float, y: float, width: float, height: float) -> str:
    """An `<image>` element of uint8 `[rows, columns, 3]`, each pixel a sharp cell."""
    data = base64.b64encode(png(pixels)).decode()
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<image {place} preserveAspectRatio="none" style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of uint8 `[rows, columns, 3]`."""
    rows, columns, _ = pixels.shape
    # Every row begins with the number of its filter, 0 for none.
    lines = np.concatenate((np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)), axis=1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
