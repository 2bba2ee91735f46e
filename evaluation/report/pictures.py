"""What one sample's cache looked like: kept positions, mass and quotas of segments, communities; from the run's arrays."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kvstitch.evaluation.records import KEPT_POSITIONS, REGIONS, RunError
from kvstitch.evaluation.report.svg import COLOURS, Axis, frame, nice_ticks, picture, raster, text

_BINS = 256
_LEFT, _WIDTH = 120, 512
# Tokens without a community, or not there yet.
NONE = (235, 235, 235)
# Few, so that pictures with many cells stay small.
_SHADES = 16
_ROW_TOKENS = 128
# Two labels, one below the other.
_LABEL_HEIGHT = 15
GREY = "grey: not there yet, or not compacted then"


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """What a run folder holds of its first sample's caches; empty if nothing was evicted or indexed.

    Raises:
        RunError: a file is damaged.
    """
    found: dict[str, np.ndarray] = {}
    for path in (folder / KEPT_POSITIONS, folder / REGIONS):
        if path.exists():
            try:
                with np.load(path) as arrays:
                    found |= dict(arrays)
            except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
                raise RunError(f"{path.name} is damaged, so nothing is drawn of it ({error})") from error
    return found


def sample_pictures(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Some layers in detail, of all that there are arrays for."""
    return kept_maps(arrays) + mass_curves(arrays) + community_maps(arrays)


def kept_maps(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """First, middle and last layer: one row an event and kv head, dark where many of the positions are still stored."""
    return [_kept_map(arrays, layer) for layer in _some(layers_of(arrays, "layer_"))]


def kept_shades(
    arrays: Mapping[str, np.ndarray], layer: int, events: Sequence[int], most_bins: int
) -> tuple[np.ndarray, int]:
    """Which positions a layer held after some events.

    Returns:
        uint8 `[H, E, bins, 3]`, the darker the more of a bin's positions are kept, grey where there was no token yet and in
        rows of events at which the layer was not compacted; and the tokens of a bin.
    """
    kept, seen = arrays[f"layer_{layer}"][list(events)].swapaxes(0, 1), arrays["seen_tokens"]
    width = -(-int(seen[-1]) // most_bins)
    bins = -(-int(seen[-1]) // width)
    rows = np.arange(kept.shape[0] * kept.shape[1]).reshape(*kept.shape[:2], 1)
    there = kept >= 0
    counts = np.bincount((rows * bins + kept // width)[there], minlength=rows.size * bins)
    starts = np.arange(bins) * width
    # The last bin may be narrower.
    shares = counts.reshape(*kept.shape[:2], bins) / np.minimum(width, int(seen[-1]) - starts)
    steps = np.rint(shares * (_SHADES - 1))[..., None] / (_SHADES - 1)
    shades = np.rint(255 + steps * (np.array([8, 48, 107]) - 255)).astype(np.uint8)
    # Right of its length at that event there was no token yet.
    shades[:, starts[None, :] >= seen[list(events), None]] = NONE
    shades[~there.any(axis=-1)] = NONE
    return shades, width


def _kept_map(arrays: Mapping[str, np.ndarray], layer: int) -> str:
    seen = arrays["seen_tokens"]
    events = len(seen)
    light, width = kept_shades(arrays, layer, range(events), _BINS)
    heads, bins = light.shape[0], light.shape[2]
    high = max(6, min(14, 160 // events))
    parts, top = [], 34
    for head in range(heads):
        height = high * events
        parts.append(raster(light[head], _LEFT, top, _WIDTH, height))
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{height}" fill="none" stroke="#888"/>')
        parts.append(text(_LEFT - 8, top + height / 2 + 4, f"kv head {head}", anchor="end"))
        top += height + 6
    parts.append(_position_ticks(int(seen[-1]), bins * width, top))
    parts.append(text(_LEFT + _WIDTH / 2, top + 34, "position in the sequence", anchor="middle"))
    at = ", ".join(map(str, seen[:8])) + (", …" if events > 8 else "")
    parts.append(text(_LEFT, top + 54, f"rows from above: events at {at} tokens; dark: kept", size=11))
    parts.append(text(_LEFT, top + 70, GREY, size=11))
    return picture(f"Kept positions, layer {layer}", _LEFT + _WIDTH + 20, top + 80, parts)


def mass_curves(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Middle layer, head 0, first and last event: running attention mass, its segments, and what each may keep."""
    layers = layers_of(arrays, "masses_")
    if not layers:
        return []
    layer = layers[len(layers) // 2]
    last = arrays[f"masses_{layer}"].shape[0] - 1
    return [_mass_curve(arrays, layer, event) for event in dict.fromkeys((0, last))]


def _mass_curve(arrays: Mapping[str, np.ndarray], layer: int, event: int) -> str:
    masses, edges, quotas = (arrays[f"{name}_{layer}"][event, 0] for name in ("masses", "boundaries", "quotas"))
    used = quotas >= 0
    masses, quotas = masses[used].astype(float), quotas[used].astype(float)
    if not len(quotas):
        return picture(f"Attention mass, layer {layer}: not compacted at this event", 560, 40, [])
    edges = edges[: len(quotas) + 1].astype(float)
    running = np.concatenate(([0.0], masses.cumsum()))
    running /= running[-1]
    shares = quotas / np.diff(edges)
    x = Axis(edges[0], edges[-1], 88, 554)
    x_ticks = [(tick, f"{tick:g}") for tick in nice_ticks(edges[0], edges[-1]) if tick <= edges[-1]]
    y = Axis(0, 1, 210, 34)
    y_ticks = [(tick, f"{100 * tick:g} %") for tick in (0.0, 0.25, 0.5, 0.75, 1.0)]
    path = "M" + "L".join(f"{x(edge)} {y(height)}" for edge, height in zip(edges, running))
    cuts = "".join(f"M{x(edge)} 34V210" for edge in edges)
    parts = [
        frame(x, y, x_ticks, y_ticks, "", "running mass"),
        f'<path d="{cuts}" stroke="#bbb" stroke-dasharray="2 2"/>',
        f'<path d="{path}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>',
    ]
    y = Axis(0, 1, 350, 246)
    parts.append(frame(x, y, x_ticks, [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")], "slot, oldest first", "kept"))
    for left, right, share, quota in zip(edges, edges[1:], shares, quotas):
        place = f'x="{x(left)}" y="{y(share)}" width="{x(right) - x(left):.2f}" height="{350 - y(share):.2f}"'
        note = f"slots {left:g} to {right:g}: keeps {quota:g}"
        parts.append(f'<rect {place} fill="{COLOURS[4]}" stroke="#fff"><title>{note}</title></rect>')
    seen = int(arrays["seen_tokens"][event])
    title = f"Attention mass, its {len(quotas)} segments and their quotas: layer {layer}, kv head 0, {seen} tokens seen"
    return picture(title, 720, 400, parts)


def community_maps(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """First, middle and last layer, kv head 0: every token in the colour of its community."""
    return [_community_map(arrays, layer) for layer in _some(layers_of(arrays, "labels_"))]


def _community_map(arrays: Mapping[str, np.ndarray], layer: int) -> str:
    labels = arrays[f"labels_{layer}"][0]
    sizes = community_sizes(labels)
    colours, largest = community_colours(sizes)
    rows = -(-len(labels) // _ROW_TOKENS)
    padded = np.full(rows * _ROW_TOKENS, -1)
    padded[: len(labels)] = labels
    high = max(8, min(16, 160 // rows))
    height = high * rows
    parts = [raster(colours[padded].reshape(rows, _ROW_TOKENS, 3), _LEFT, 34, _WIDTH, height)]
    for row in range(0, rows, max(-(-_LABEL_HEIGHT // high), rows // 8)):
        parts.append(text(_LEFT - 8, 34 + high * (row + 0.5) + 4, f"token {row * _ROW_TOKENS}", anchor="end", size=11))
    top = 34 + height + 18
    for index, label in enumerate(largest):
        left, line = _LEFT + 130 * (index % 4), top + 20 * (index // 4)
        parts.append(f'<rect x="{left}" y="{line - 10}" width="12" height="12" fill="{COLOURS[index]}"/>')
        parts.append(text(left + 18, line, f"{sizes[label]} tokens", size=11))
    top += 20 * (-(-len(largest) // 4)) + 4
    name = f"modularity_{layer}"
    found = f", modularity {float(arrays[name]):.3f}" if name in arrays else ""
    middle = f", median size {np.median(sizes[sizes > 0]):g}" if len(sizes) else ""
    parts.append(text(_LEFT, top, f"{(sizes > 0).sum()} communities{middle}{found}", size=11))
    top += 18
    parts.append(text(_LEFT, top, "pale: smaller communities, whose colours repeat; lightest grey: none", size=11))
    return picture(f"Communities of tokens, layer {layer}, kv head 0", _LEFT + _WIDTH + 60, top + 14, parts)


def community_sizes(labels: np.ndarray) -> np.ndarray:
    """Tokens of each community; a label of -1 is none."""
    return np.bincount(labels[labels >= 0]) if (labels >= 0).any() else np.zeros(0, int)


def community_colours(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 `[R + 1, 3]`, a colour for each community and, last, for tokens without one; and the largest communities, which
    alone have a colour of their own."""
    order = np.argsort(-sizes, kind="stable")
    largest = order[: len(COLOURS)]
    palette = np.array([[int(colour[start : start + 2], 16) for start in (1, 3, 5)] for colour in COLOURS])
    colours = np.empty((len(sizes) + 1, 3), np.uint8)
    # Colours repeat, so the largest few have them pure and the others pale.
    colours[order] = (255 - 0.45 * (255 - palette))[np.arange(len(order)) % len(COLOURS)]
    colours[largest] = palette[: len(largest)]
    colours[-1] = NONE
    return colours, largest


def layers_of(arrays: Mapping[str, np.ndarray], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in arrays if name.startswith(prefix))


def _some(layers: list[int]) -> list[int]:
    return sorted({layers[0], layers[len(layers) // 2], layers[-1]}) if layers else []


def _position_ticks(seen: int, span: int, top: float) -> str:
    axis = Axis(0, span, _LEFT, _LEFT + _WIDTH)
    ticks = [tick for tick in nice_ticks(0, seen) if tick <= seen]
    marks = [f'<path d="M{axis(tick)} {top}v4" stroke="#333"/>' for tick in ticks]
    return "".join(marks + [text(axis(tick), top + 17, f"{tick:g}", anchor="middle", size=11) for tick in ticks])
