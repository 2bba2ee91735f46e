"""Scalable pictures as text: axes, marks, cells, and raster images inside them."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

# Okabe and Ito's palette, told apart by the colour-blind; its yellow is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus")
WIDTH = 570
LEFT, RIGHT, TOP = 88, 16, 34
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
        right, bottom = _HEAT_LEFT + wide * len(self.columns), TOP + high * len(self.rows)
        parts = []
        for row, numbers in enumerate(self.values):
            parts.append(text(_HEAT_LEFT - 6, TOP + high * row + high / 2 + 4, self.rows[row], anchor="end"))
            for column, number in enumerate(numbers):
                left, top = _HEAT_LEFT + wide * column, TOP + high * row
                fill = "#fff" if number is None else shade(number)
                ink = "#fff" if number is not None and number > 0.55 else "#000"
                parts.append(f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="{fill}" stroke="#bbb"/>')
                words = "–" if number is None else f"{100 * number:.0f} %"
                parts.append(text(left + wide / 2, top + high / 2 + 4, words, anchor="middle", fill=ink))
        for column, words in enumerate(self.columns):
            parts.append(text(_HEAT_LEFT + wide * (column + 0.5), bottom + 16, words, anchor="middle"))
        parts.append(text((_HEAT_LEFT + right) / 2, bottom + 36, self.x_title, anchor="middle"))
        parts.append(upright(14, (TOP + bottom) / 2, self.y_title))
        width = max(right + RIGHT, 9 * len(self.title))
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
    left, right = min(x.start, LEFT), max(x.stop, WIDTH - RIGHT)
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
        return f'<circle cx="{x:g}" cy="{y:g}" r="4.5" {style}/>'
    if shape == "square":
        return f'<rect x="{x - 4:g}" y="{y - 4:g}" width="8" height="8" {style}/>'
    if shape == "triangle":
        return f'<path d="M{x:g} {y - 5:g}l5 9h-10z" {style}/>'
    if shape == "diamond":
        return f'<path d="M{x:g} {y - 6:g}l5 6l-5 6l-5 -6z" {style}/>'
    strokes = "l8 8m0 -8l-8 8" if shape == "cross" else "m4 -1v10m-5 -5h10"
    return f'<path d="M{x - 4:g} {y - 4:g}{strokes}" fill="none" stroke="{colour}" stroke-width="2.5"/>'


def dash(index: int) -> str:
    """The attribute that makes the line of a series dashed; "" for a whole line."""
    pattern = DASHES[index % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


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
