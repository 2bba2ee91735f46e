"""The page stands alone, holds every picture, and a real browser draws it without a complaint."""

import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import pytest

from kvstitch.evaluation.report import find_runs, sections_of, write_report
from kvstitch.evaluation.report.svg import COLOURS, Axis, LineChart, Series, nice_ticks, png

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def written(full_set, make_run, tmp_path):
    make_run(budget=32, bound=False, seed=1, arrays=False)
    make_run(budget=16, failed=("s1",), seed=1, arrays=False)
    broken = make_run(budget=8)
    (broken / "metrics.json").unlink()
    runs, problems = find_runs([full_set])
    write_report(tmp_path / "out", sections_of(runs), problems, title="A <title> & more")
    return tmp_path / "out" / "report.html"


@pytest.fixture
def pictures(written):
    found = re.findall(r"<svg .*?</svg>", written.read_text(), flags=re.DOTALL)
    # A later section repeats the titles of the first.
    return {ElementTree.fromstring(svg).get("aria-label"): svg for svg in reversed(found)}


def test_every_kind_of_picture_is_there(pictures):
    for title in (
        "answers right",
        "KL(dense || pressed), nats",
        "KV storage, peak, MiB",
        "decoded tokens/s",
        "Needles found: dense",
        "Needles found: ams tova segment_quota 64 tokens",
        "Kept positions, layer 1",
        "Communities of tokens, layer 1, kv head 0",
    ):
        assert title in pictures, title
    assert any(title.startswith("Attention mass, its 10 segments and their quotas") for title in pictures)
    assert "modularity 0.610" in pictures["Communities of tokens, layer 1, kv head 0"]


def test_lines_differ_in_colour_marker_and_dash_and_the_dense_model_is_level(pictures):
    chart = pictures["answers right"]
    lines = re.findall(
        r'<path d="M[^"]*L[^"]*" fill="none" stroke="(#\w+)" stroke-width="2"( stroke-dasharray="[^"]*")?/>', chart
    )
    assert len(lines) == 3 and len(set(lines)) == 3 and {colour for colour, _ in lines} <= set(COLOURS)
    assert "<circle" in chart and "<rect" in chart and 'stroke="#555"' in chart and "dense: " in chart


def test_the_page_needs_nothing_else_and_says_what_is_missing(written):
    text = written.read_text()
    assert "<script" not in text and not re.search(r'(href|src)="(?!data:)', text)
    assert "url(" not in text and "@import" not in text
    assert "A &lt;title&gt; &amp; more" in text
    assert "the budget never bound" in text and "failed samples count in no figure (s1)" in text
    assert "not finished; give its command again" in text and text.count("★") >= 6


def test_a_page_of_the_dense_model_alone(make_run, tmp_path):
    runs, problems = find_runs([make_run(press="dense", scorer=None, allocator=None)])
    write_report(tmp_path / "out", sections_of(runs), problems)
    assert "Needles found: dense" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
def test_a_browser_draws_it_without_errors(written, tmp_path):
    picture = tmp_path / "page.png"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,3000", f"--screenshot={picture}", written.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    width, height, pixels = read_png(picture.read_bytes())
    assert (width, height) == (1200, 3000)
    # The colours of the first lines and of the heat maps' dark end really are on the screen.
    for colour in COLOURS[:2]:
        wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
        assert (pixels[..., :3] == wanted).all(axis=-1).sum() > 100, colour


def read_png(data):
    """Width, height and pixels of an 8-bit PNG."""
    width, height, _, kind = struct.unpack(">IIBB", data[16:26])
    channels = {2: 3, 6: 4}[kind]
    place, packed = 8, b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width * channels), np.uint8)
    for row in range(height):
        out[row] = unfilter(rows[row, 0], rows[row, 1:], out[row - 1] if row else np.zeros_like(out[0]), channels)
    return width, height, out.reshape(height, width, channels)


def unfilter(kind, line, above, step):
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    if kind == 1:
        return line.reshape(-1, step).cumsum(axis=0, dtype=np.uint8).ravel()
    result = line.astype(int).tolist()
    up = above.tolist()
    for index in range(len(result)):
        left = result[index - step] if index >= step else 0
        corner = up[index - step] if index >= step else 0
        guess = (left + up[index]) // 2
        if kind == 4:
            base = left + up[index] - corner
            guess = min((left, up[index], corner), key=lambda value: abs(base - value))
        result[index] = (result[index] + guess) % 256
    return np.array(result, np.uint8)


def test_png_is_what_its_pixels_are():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    width, height, read = read_png(png(pixels))
    assert (width, height) == (7, 5) and (read == pixels).all()


@pytest.mark.parametrize("low, high", [(0.02, 0.4), (-3, 1200), (0.5, 0.5), (0, 0), (1e-6, 2e-6)])
def test_ticks_are_round_and_cover_everything(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 9
    assert all(len(f"{tick:g}") <= 8 for tick in ticks)


def test_axes():
    assert [Axis(64, 256, 0, 100, True)(value) for value in (64, 128, 256)] == [0, 50, 100]
    assert Axis(0, 2, 10, 0)(0.5) == 7.5


def test_error_bars_have_the_length_of_the_error():
    chart = LineChart(
        "t", "x", "y", [(1.0, "1"), (2.0, "2")], [Series("m", [(1.0, 0.2, 0.1), (2.0, 0.6, None)])]
    ).draw()
    (low, high) = map(float, re.search(r'd="M[\d.]+ ([\d.]+)V([\d.]+)M', chart).groups())
    heights = dict(re.findall(r'y="([\d.]+)" text-anchor="end"[^>]*>([\d.]+)<', chart))
    by_value = {float(value): float(place) - 4 for place, value in heights.items()}
    pixel_per_unit = (by_value[0.2] - by_value[0.6]) / 0.4
    assert low - high == pytest.approx(0.2 * pixel_per_unit, abs=0.05)
