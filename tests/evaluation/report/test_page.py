"""The page stands alone, holds every picture, and a real browser draws it without a complaint."""

import html as html_module
import json
import math
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import pytest

from kvstitch.evaluation.report import find_runs, papers_of, sections_of, write_report
from kvstitch.evaluation.report.line_chart import LineChart, Series
from kvstitch.evaluation.report.pictures import community_maps
from kvstitch.evaluation.report.svg import COLOURS, Axis, nice_ticks, png

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def written(full_set, make_run, tmp_path):
    make_run(budget=32, bound=False, seed=1, arrays=False)
    make_run(budget=16, failed=("s1",), seed=1, arrays=False)
    for budget in (8, 9):
        (make_run(budget=budget) / "metrics.json").unlink()
    make_run(budget=256, press="topk", allocator="global_topk", seed=1)
    runs, problems = find_runs([full_set])
    write_report(tmp_path / "out", sections_of(runs), problems, title="A <title> & more", papers=papers_of(runs))
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
        "Kept positions, all layers and kv heads",
        "Attention mass, segments and quotas, all layers and kv heads",
        "Communities of tokens, all layers and kv heads",
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
    assert text.count("★") >= 6
    # What is left out is told after all that is there, each reason once.
    assert "2 runs are not in this report, or not all of it" in text
    assert text.count("not finished; give its command again") == 1
    assert text.index("not finished; give its command again") > text.rindex("<svg")
    assert text.count("<code>needle-ams-tova-") == 2
    assert "Published: AMS (arXiv 2605.23200), tables 1 and 5" in text and "<td>22.8</td>" in text


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


# Run in the page: texts of one picture that lie on each other or stand out of it, and whether the page is too wide.
FIND_FAULTS = """<script>
const faults = [];
for (const svg of document.querySelectorAll('svg')) {
  const name = svg.getAttribute('aria-label'), frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([words, box], index) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1) faults.push([name, words]);
    for (const [other, its] of texts.slice(index + 1)) {
      const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
      const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
      if (wide > 1 && high > 4) faults.push([name, words, other]);
    }
  });
}
if (document.documentElement.scrollWidth > document.documentElement.clientWidth) faults.push(['the page is too wide']);
const found = document.createElement('pre');
found.id = 'faults';
found.textContent = JSON.stringify(faults);
document.body.append(found);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
def test_no_text_of_a_picture_lies_on_another_or_is_cut_off(written, tmp_path):
    # Ticks with many digits want much room beside the axis.
    narrow = [Series("m", [(64.0, 0.50541, None), (128.0, 0.50589, 0.0001)])]
    long_ticks = LineChart("long ticks", "x", "y", [(64.0, "64"), (128.0, "128")], narrow, percent=True).draw()
    page = written.read_text().replace("</body>", f"<figure>{long_ticks}</figure></body>")
    # What is folded up, too.
    assert "<details>" in page
    page = page.replace("<details>", "<details open>")
    assert "50.54 %" in page and faults_of(page, tmp_path) == []
    # As wide as A4 between its margins, in the style of print: nothing is cut off at the right edge either.
    assert "@media print" in page
    assert faults_of(page.replace("@media print", "@media screen"), tmp_path, width=718) == []
    # The search itself finds what it is for.
    bad = '<svg viewBox="0 0 90 40" width="90" height="40" aria-label="bad"><text x="5" y="20">first</text>'
    bad += '<text x="9" y="22">second</text><text x="80" y="35">third</text></svg></body>'
    assert faults_of(f"<!doctype html><body>{bad}", tmp_path) == [["bad", "first", "second"], ["bad", "third"]]


def faults_of(html, folder, width=1200):
    page = folder / "with_search.html"
    page.write_text(html.replace("</body>", FIND_FAULTS + "</body>"))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},3000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r'<pre id="faults">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html_module.unescape(found[1]))


@pytest.mark.parametrize("tokens", [100, 300, 1100, 9000])
def test_rows_of_community_maps_are_labelled_without_a_collision(tokens):
    labels = np.repeat(np.arange(-(-tokens // 25)), 25)[None, :tokens].astype(np.int32)
    (svg,) = community_maps({"labels_0": labels})
    places = [float(y) for y in re.findall(r'<text x="112" y="([\d.]+)" text-anchor="end"[^>]*>token ', svg)]
    assert places and all(below - above >= 14 for above, below in zip(places, places[1:]))
    assert len(places) <= 17


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


def test_an_axis_ends_at_its_limits_and_error_bars_with_it():
    points = [(1.0, 0.95, 0.2), (2.0, 0.03, 0.2)]
    chart = LineChart("t", "x", "y", [(1.0, "1"), (2.0, "2")], [Series("m", points)], limits=(0, 1)).draw()
    heights = {
        float(words): float(y) - 4 for y, words in re.findall(r'y="([\d.]+)" text-anchor="end"[^>]*>([\d.-]+)<', chart)
    }
    assert min(heights) == 0 and max(heights) == 1
    ends = [tuple(map(float, pair)) for pair in re.findall(r'd="M[\d.]+ ([\d.]+)V([\d.]+)M', chart)]
    assert ends[0][1] == pytest.approx(heights[1]) and ends[1][0] == pytest.approx(heights[0])


@pytest.mark.parametrize("outside, others", [(-1.3e-8, []), (-1.3e-8, [0.2]), (1 + 1e-9, []), (1.3, [0.7])])
@pytest.mark.parametrize("is_reference", [False, True])
def test_what_is_rounded_beyond_a_limit_is_drawn_on_it(outside, others, is_reference):
    heights = [*others, 0.5 if is_reference else outside]
    points = [(float(place), height, None) for place, height in enumerate(heights, start=1)]
    chart = LineChart(
        "t", "x", "y", [(x, f"{x:g}") for x, _, _ in points], [Series("m", points)],
        reference=("dense", outside) if is_reference else None, limits=(0, 1),
    ).draw()  # fmt: skip
    ElementTree.fromstring(chart)
    ticks = {
        float(words): float(y) - 4 for y, words in re.findall(r'y="([\d.]+)" text-anchor="end"[^>]*>([\d.-]+)<', chart)
    }
    assert 0 <= min(ticks) < max(ticks) <= 1 and "-0.0" not in chart
    if is_reference:
        drawn = re.search(r'<path d="M88 ([\d.]+)H554" stroke="#555"', chart)[1]
    else:
        # The last mark is the legend's.
        drawn = re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', chart)[-2]
    assert float(drawn) == ticks[round(outside)]


def test_lines_of_equal_height_stand_beside_each_other():
    same = [(64.0, 1.0, None), (128.0, 1.0, None)]
    chart = LineChart("t", "x", "y", [(64.0, "64"), (128.0, "128")], [Series(name, same) for name in "abc"]).draw()
    starts = [float(x) for x in re.findall(r'<path d="M([\d.]+) [\d.]+L', chart)]
    assert len(starts) == 3 and [right - left for left, right in zip(starts, starts[1:])] == [5, 5]


@pytest.mark.parametrize(
    "low, high, percent", [(10.94, 11.0, False), (0.0001, 0.0009, False), (0.991, 0.995, True), (3, 9, False)]
)
def test_no_two_ticks_read_alike(low, high, percent):
    points = [(1.0, low, None), (2.0, high, None)]
    chart = LineChart("t", "x", "y", [(1.0, "1"), (2.0, "2")], [Series("m", points)], percent).draw()
    ticks = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', chart)
    assert len(ticks) >= 3 and len(set(ticks)) == len(ticks)
    numbers = [float(tick.removesuffix(" %")) / (100 if percent else 1) for tick in ticks]
    assert min(numbers) <= low + 1e-9 and max(numbers) >= high - 1e-9


@pytest.mark.parametrize(
    "height, error, limits, percent, ticks",
    [
        (52.3, 0.001, (0, math.inf), False, ("0", "60")),
        (0.97, None, (0, 1), True, ("0 %", "100 %")),
        (0.0, None, (0, math.inf), False, ("0.0", "0.6")),
        (-0.2, 0.1, (-math.inf, math.inf), False, ("-0.30", "-0.10")),
    ],
)
def test_the_axis_of_a_single_point_is_not_cut(height, error, limits, percent, ticks):
    series = [Series("m", [(256.0, height, error)])]
    svg = LineChart("t", "x", "y", [(256.0, "256")], series, percent, limits=limits).draw()
    written = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', svg)
    assert (written[0], written[-1]) == ticks
