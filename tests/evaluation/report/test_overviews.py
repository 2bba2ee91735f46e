"""Every layer and kv head is in the overviews, with the colours that its arrays ask for; damaged arrays cost no page."""

import base64
import re
import struct
import zlib

import numpy as np
import pytest

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.overviews import (
    community_overview,
    kept_overview,
    mass_overview,
    sample_overviews,
)
from kvstitch.evaluation.report.page import page
from kvstitch.evaluation.report.pictures import NONE, kept_shades, read_arrays
from kvstitch.evaluation.report.svg import COLOURS

DARK, WHITE = (8, 48, 107), (255, 255, 255)


def images(svg):
    """Pixels of each raster, whose rows have no filter."""
    found = []
    for data in re.findall(r"base64,([^\"]+)", svg):
        png = base64.b64decode(data)
        columns, rows = struct.unpack(">II", png[16:24])
        (length,) = struct.unpack(">I", png[33:37])
        lines = np.frombuffer(zlib.decompress(png[41 : 41 + length]), np.uint8).reshape(rows, -1)
        assert not lines[:, 0].any()
        found.append(lines[:, 1:].reshape(rows, columns, 3))
    return found


def words(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def kept_arrays(layers, heads, seen, kept=8):
    """Head h of layer l keeps the first positions from l + h on at every event."""
    arrays = {"seen_tokens": np.array(seen)}
    for layer in range(layers):
        starts = layer + np.arange(heads)[None, :, None]
        arrays[f"layer_{layer}"] = (starts + np.zeros((len(seen), 1, 1), int) + np.arange(kept)).astype(np.int32)
    return arrays


def test_each_layer_head_and_event_has_its_row():
    arrays = kept_arrays(3, 2, (20, 40))
    # At its second event one layer stayed within its budget.
    arrays["layer_1"][1] = -1
    (svg,) = kept_overview(arrays)
    heads = images(svg)
    assert len(heads) == 2
    for head, pixels in enumerate(heads):
        # Of each layer two events and a white row.
        assert pixels.shape == (9, 40, 3)
        for layer in range(3):
            first, second, below = pixels[3 * layer : 3 * layer + 3]
            wanted = [
                DARK if layer + head <= place < layer + head + 8 else WHITE if place < 20 else NONE
                for place in range(40)
            ]
            assert first.tolist() == [list(colour) for colour in wanted]
            later = [DARK if layer + head <= place < layer + head + 8 else WHITE for place in range(40)]
            assert second.tolist() == [list(NONE if layer == 1 else colour) for colour in later]
            assert (below == 255).all()
    assert [f"layer {layer}" in words(svg) for layer in range(4)] == [True] * 3 + [False]
    assert "kv head 1" in words(svg) and any("at 20, 40 tokens" in line for line in words(svg))


def test_a_bin_is_as_dark_as_the_share_of_it_that_is_kept():
    arrays = {"seen_tokens": np.array([10]), "layer_0": np.array([[[0, 1, 2, 3, 4, 8, 9, -1]]], np.int32)}
    shades, width = kept_shades(arrays, 0, [0], 3)
    assert width == 4 and shades.shape == (1, 1, 3, 3)
    # Full; a quarter, by the nearest shade; and the narrow last bin, full, too.
    assert shades[0, 0, 0].tolist() == shades[0, 0, 2].tolist() == list(DARK)
    assert shades[0, 0, 1].tolist() == [round(255 + 4 / 15 * (dark - 255)) for dark in DARK]


def test_of_many_events_some_are_shown_with_the_first_and_the_last():
    (svg,) = kept_overview(kept_arrays(30, 1, range(100, 4100, 100)))
    assert images(svg)[0].shape[0] == 30 * 17
    (line,) = [line for line in words(svg) if "events" in line]
    assert "the events (of 40) at 100, " in line


def test_heads_that_find_no_room_stand_below_with_their_layers_named_again():
    (svg,) = kept_overview(kept_arrays(2, 9, (64,)))
    assert len(images(svg)) == 9 and words(svg).count("layer 1") == 2 and "kv head 8" in words(svg)


def mass_arrays():
    """Two layers and heads; a layer's second head has two segments, and the last event compacted layer 0 alone."""
    one = {"masses": [1.0, 1.0, 2.0], "boundaries": [0, 10, 20, 40], "quotas": [10, 5, 0]}
    two = {"masses": [3.0, 1.0, -1], "boundaries": [0, 20, 40, -1], "quotas": [20, 10, -1]}
    arrays = {"seen_tokens": np.array([40, 80])}
    for layer in range(2):
        for name in one:
            event = np.array([one[name], two[name]], float)
            arrays[f"{name}_{layer}"] = np.stack([event, event if layer == 0 else np.full_like(event, -1)])
    return arrays


def test_each_layer_and_head_has_its_mass_curve_and_quotas():
    (svg,) = mass_overview(mass_arrays())
    wide = 316
    lines = re.findall(rf'<path d="M([^"]+)" fill="none" stroke="{COLOURS[0]}"', svg)
    first, second = f"0 30L{wide // 4} 22L{wide // 2} 15L{wide} 0", f"0 30L{wide // 2} 8L{wide} 0"
    # Head by head, each with both layers; the curve of a layer is that of its own last event.
    assert lines == [first, first, second, second]
    bars = re.findall(rf'<path d="([^"]+)" fill="{COLOURS[4]}"', svg)
    assert bars[0] == f"M0 30V0H{wide // 4}V30M{wide // 4} 30V15H{wide // 2}V30M{wide // 2} 30V30H{wide}V30"
    assert bars[2] == f"M0 30V0H{wide // 2}V30M{wide // 2} 30V15H{wide}V30"


def test_a_layer_that_was_never_compacted_has_an_empty_cell():
    arrays = mass_arrays()
    for name in ("masses", "boundaries", "quotas"):
        arrays[f"{name}_1"][:] = -1
    (svg,) = mass_overview(arrays)
    assert svg.count("<g ") == 4 and svg.count(COLOURS[0]) == 2


def test_each_layer_and_head_has_its_communities():
    labels = np.array([[0, 0, 0, 1, 1, -1], [1, 1, 1, 1, 0, 0]])
    (svg,) = community_overview({"labels_0": labels, "labels_4": labels[::-1], "modularity_4": np.array(0.25)})
    (pixels,) = images(svg)
    colour = [[int(text[start : start + 2], 16) for start in (1, 3, 5)] for text in COLOURS]
    # The largest community of a row has the first colour, whatever its number.
    one = [colour[0]] * 3 + [colour[1]] * 2 + [list(NONE)]
    two = [colour[0]] * 4 + [colour[1]] * 2
    assert pixels.tolist() == [one, two, [[255] * 3] * 6, two, one, [[255] * 3] * 6]
    assert {"layer 0", "layer 4", "2 communities", "2 communities, modularity 0.250"} <= set(words(svg))


def test_of_many_tokens_a_bin_has_the_colour_of_the_one_in_its_middle():
    labels = np.arange(2000)[None] // 500
    (pixels,) = images(community_overview({"labels_0": labels})[0])
    assert pixels.shape == (2, 500, 3) and len({tuple(pixel) for pixel in pixels[0]}) == 4
    assert (pixels[0, 124] == pixels[0, 0]).all() and (pixels[0, 125] != pixels[0, 0]).any()


def test_nothing_is_drawn_of_nothing():
    assert sample_overviews({}) == []


def test_every_budget_has_its_overview_and_the_page_stays_small(make_run):
    """As of a model with 30 layers of 3 kv heads, after 4 events; the middle budget is shown, the others are folded up."""
    rng = np.random.default_rng(0)
    folders = [make_run(budget=budget, arrays=False) for budget in (64, 128, 256)]
    folders.append(make_run(press="community", allocator="community", budget=64, arrays=False))
    seen = np.array([512, 1024, 1536, 2048])
    for folder, budget in zip(folders[:3], (64, 128, 256)):
        arrays = {"seen_tokens": seen}
        for layer in range(30):
            arrays[f"layer_{layer}"] = np.stack(
                [[np.sort(rng.choice(tokens, budget, False)) for _ in range(3)] for tokens in seen]
            )
            edges = np.sort(np.argsort(rng.random((4, 3, 760)), axis=-1)[..., :19] + 1, axis=-1)
            edges = np.concatenate((np.zeros((4, 3, 1), int), edges, np.full((4, 3, 1), 768)), axis=-1)
            arrays |= {f"boundaries_{layer}": edges, f"quotas_{layer}": np.minimum(np.diff(edges), budget // 20)}
            arrays[f"masses_{layer}"] = rng.random((4, 3, 20))
        np.savez_compressed(folder / "kept_positions.npz", **arrays)
    labels = {f"labels_{layer}": rng.integers(0, 80, (3, 2048)) for layer in range(30)}
    np.savez_compressed(folders[3] / "regions.npz", **labels)
    runs, problems = find_runs(folders)
    html = page(sections_of(runs), problems, "t")
    assert len(html.encode()) < 2_000_000
    assert html.count('aria-label="Kept positions, all layers and kv heads"') == 3
    assert html.count('aria-label="Communities of tokens, all layers and kv heads"') == 1
    folded = re.findall(r"<details><summary>([^<]+)</summary>", html)
    assert folded == [
        f"ams tova segment_quota, {budget} tokens: the caches of the first sample" for budget in (64, 256)
    ]
    for layer in range(30):
        assert html.count(f">layer {layer}</text>") == 3 * 2 + 1


@pytest.mark.parametrize("damage", ["torn", "one byte"])
def test_arrays_that_cannot_be_read_cost_their_pictures_and_nothing_else(make_run, damage):
    folder = make_run()
    path = folder / "kept_positions.npz"
    content = bytearray(path.read_bytes())
    if damage == "torn":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"kept_positions\.npz is damaged, so nothing is drawn of it \(.+\)"):
        read_arrays(folder)
    runs, problems = find_runs([folder])
    html = page(sections_of(runs), problems, "t")
    assert "the caches of the first sample: kept_positions.npz is damaged" in html and "Kept positions" not in html
    assert "answers right" in html
    assert len(problems) == (damage == "torn") and ("or not all of it; see its end" in html) is (damage == "torn")
