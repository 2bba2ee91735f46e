"""What one sample's cache looked like in all layers and kv heads at once: small cells beside the pictures of some layers."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvstitch.evaluation.report.pictures import (
    GREY,
    community_colours,
    community_sizes,
    kept_shades,
    layers_of,
)
from kvstitch.evaluation.report.svg import COLOURS, picture, raster, text

_LEFT, _TOP, _WIDTH = 74, 52, 640
_GAP = 8
_GRID = _LEFT + _WIDTH + 16
# A wider model's heads stand in several blocks, one below the other.
_MOST_COLUMNS = 8
_LABEL_HEIGHT = 15
_MOST_BINS, _TOKEN_BINS = 128, 512
# Events are left out, evenly, where there would be more rows than this over all layers, or more events than that.
_MOST_ROWS, _MOST_EVENTS = 512, 16
_CURVE_HEIGHT = 30


def sample_overviews(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """A picture of all layers and kv heads for each kind of array that there is."""
    return [*kept_overview(arrays), *mass_overview(arrays), *community_overview(arrays)]


def kept_overview(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """A cell a layer and kv head with a row an event: which positions were still stored."""
    layers = layers_of(arrays, "layer_")
    if not layers:
        return []
    seen, heads = arrays["seen_tokens"], arrays[f"layer_{layers[0]}"].shape[1]
    events = _some_events(len(seen), max(4, min(_MOST_EVENTS, _MOST_ROWS // len(layers))))
    wide = _cell_width(heads)
    shades = [kept_shades(arrays, layer, events, min(_MOST_BINS, wide))[0] for layer in layers]
    # A white row below each layer's.
    columns = np.pad(np.stack(shades, axis=1), ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0)), constant_values=255)
    step = max(2.0, _LABEL_HEIGHT / (len(events) + 1))
    rows = step * (len(events) + 1)
    high = rows * len(layers)
    parts, bottom = [], _TOP
    for head, left, top in _places(heads, high + 40):
        parts += _layer_names(layers, top, rows) if left == _LEFT else []
        # Layers and events below each other.
        parts.append(raster(columns[head].reshape(-1, *columns.shape[3:]), left, top, wide, high))
        parts.append(text(left, top - 6, f"kv head {head}", size=11))
        parts.append(text(left, top + high + 12, "0", size=11))
        parts.append(text(left + wide, top + high + 12, f"{seen[-1]}", anchor="end", size=11))
        bottom = top + high
    at = ", ".join(str(seen[event]) for event in events[:8]) + (", …" if len(events) > 8 else "")
    all_of = "" if len(events) == len(seen) else f" (of {len(seen)})"
    notes = [f"in each layer from above: the events{all_of} at {at} tokens", f"across: position; dark: kept; {GREY}"]
    return [_finished("Kept positions, all layers and kv heads", _GRID, parts, bottom + 16, notes)]


def mass_overview(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """A cell a layer and kv head: running attention mass over the slots, and how much of each segment may stay."""
    layers = layers_of(arrays, "masses_")
    if not layers:
        return []
    heads = arrays[f"masses_{layers[0]}"].shape[1]
    wide, rows = _cell_width(heads), _CURVE_HEIGHT + 6
    parts, bottom = [], _TOP
    for head, left, top in _places(heads, rows * len(layers) + 24):
        parts += _layer_names(layers, top, rows) if left == _LEFT else []
        parts.append(text(left, top - 6, f"kv head {head}", size=11))
        for line, layer in enumerate(layers):
            curve = _curve(arrays, layer, head, wide)
            box = f'<path d="M0 0H{wide}V{_CURVE_HEIGHT}H0z" fill="none" stroke="#bbb"/>'
            parts.append(f'<g transform="translate({left} {top + rows * line})">{box}{curve}</g>')
        bottom = top + rows * len(layers)
    notes = [
        "across: slots, oldest first, at the last event of the layer; line: running mass from 0 to 100 %",
        "bars: the share of each segment that its quota keeps",
    ]
    title = "Attention mass, segments and quotas, all layers and kv heads"
    return [_finished(title, _GRID, parts, bottom, notes)]


def _curve(arrays: Mapping[str, np.ndarray], layer: int, head: int, wide: int) -> str:
    """Bars and line of one cell, in whole pixels; nothing if the layer was never compacted."""
    quotas = arrays[f"quotas_{layer}"][:, head]
    events = np.flatnonzero((quotas >= 0).any(axis=-1))
    if not len(events):
        return ""
    used = quotas[events[-1]] >= 0
    quotas = quotas[events[-1]][used]
    masses = arrays[f"masses_{layer}"][events[-1], head][used].astype(float)
    edges = arrays[f"boundaries_{layer}"][events[-1], head][: len(quotas) + 1].astype(float)
    x = np.rint((edges - edges[0]) / (edges[-1] - edges[0]) * wide).astype(int)
    running = np.concatenate(([0.0], masses.cumsum() / masses.sum()))
    y = np.rint(_CURVE_HEIGHT * (1 - running)).astype(int)
    tops = np.rint(_CURVE_HEIGHT * (1 - quotas / np.diff(edges))).astype(int)
    bars = "".join(f"M{a} {_CURVE_HEIGHT}V{top}H{b}V{_CURVE_HEIGHT}" for a, b, top in zip(x, x[1:], tops))
    line = "L".join(f"{a} {b}" for a, b in zip(x, y))
    return (
        f'<path d="{bars}" fill="{COLOURS[4]}" stroke="#fff" stroke-width=".5"/>'
        f'<path d="M{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>'
    )


def community_overview(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """A row a layer and kv head: its tokens in the colours of their communities, with their number and modularity."""
    layers = layers_of(arrays, "labels_")
    if not layers:
        return []
    heads, tokens = arrays[f"labels_{layers[0]}"].shape
    step = max(3.0, _LABEL_HEIGHT / (heads + 1))
    rows = step * (heads + 1)
    parts = _layer_names(layers, _TOP, rows)
    lines = []
    for line, layer in enumerate(layers):
        labels = arrays[f"labels_{layer}"]
        lines += [_community_row(row, tokens) for row in labels]
        # A white row below each layer's.
        lines.append(np.full_like(lines[-1], 255))
        count = np.mean([(community_sizes(row) > 0).sum() for row in labels])
        words = f"{count:.3g} communities"
        if f"modularity_{layer}" in arrays:
            words += f", modularity {float(arrays[f'modularity_{layer}']):.3f}"
        parts.append(text(_LEFT + _TOKEN_BINS + 8, _TOP + rows * line + rows / 2 + 3, words, size=11))
    high = rows * len(layers)
    parts.append(raster(np.stack(lines), _LEFT, _TOP, _TOKEN_BINS, high))
    parts.append(text(_LEFT, _TOP + high + 12, "0", size=11))
    parts.append(text(_LEFT + _TOKEN_BINS, _TOP + high + 12, str(tokens), anchor="end", size=11))
    notes = [
        f"in each layer from above: its {heads} kv heads; across: position; the numbers are means over the heads",
        "colours are a row's own; pale: smaller communities, whose colours repeat; lightest grey: none",
    ]
    title = "Communities of tokens, all layers and kv heads"
    return [_finished(title, _LEFT + _TOKEN_BINS + 240, parts, _TOP + high + 16, notes)]


def _community_row(labels: np.ndarray, tokens: int) -> np.ndarray:
    """`[bins, 3]`: the colour of the community of every token, or of one in the middle of as many as share a bin."""
    padded = np.full(tokens, -1)
    padded[: len(labels)] = labels[:tokens]
    width = -(-tokens // _TOKEN_BINS)
    middles = np.minimum(np.arange(0, tokens, width) + width // 2, tokens - 1)
    return community_colours(community_sizes(labels))[0][padded[middles]]


def _some_events(count: int, most: int) -> list[int]:
    """All, or evenly many of them with the first and the last."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def _cell_width(heads: int) -> int:
    columns = min(heads, _MOST_COLUMNS)
    return min(400, (_WIDTH - _GAP * (columns - 1)) // columns)


def _places(heads: int, block: float) -> Iterator[tuple[int, float, float]]:
    """Head, left and top of its column; `block` is the height of a row of columns with what stands around it."""
    for head in range(heads):
        row, column = divmod(head, _MOST_COLUMNS)
        yield head, _LEFT + column * (_cell_width(heads) + _GAP), _TOP + row * block


def _layer_names(layers: Sequence[int], top: float, rows: float) -> list[str]:
    """Of as many layers as there is room for names, each `rows` high."""
    every = int(-(-_LABEL_HEIGHT // rows))
    return [
        text(_LEFT - 8, top + rows * line + min(rows, _LABEL_HEIGHT) / 2 + 4, f"layer {layer}", anchor="end", size=11)
        for line, layer in enumerate(layers)
        if line % every == 0
    ]


def _finished(title: str, width: float, parts: Sequence[str], bottom: float, notes: Sequence[str]) -> str:
    lines = [text(_LEFT, bottom + 20 + 16 * line, words, size=11) for line, words in enumerate(notes)]
    return picture(title, width, bottom + 16 * len(notes) + 20, [*parts, *lines])
