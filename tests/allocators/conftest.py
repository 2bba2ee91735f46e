"""Layers to allocate over, and AMS written with loops over Python numbers."""

from types import SimpleNamespace

import pytest
import torch

from kvstitch.views import LayerView, QueryWindow, Rotary


@pytest.fixture
def make_view():
    """Random layers; `holes` marks empty slots, whose keys, values and scores then hold NaN."""

    def make(batch=2, heads=3, group=2, slots=60, window=8, head_dim=8, holes=None, seed=0):
        draw = torch.Generator().manual_seed(seed)
        valid = torch.ones(batch, heads, slots, dtype=torch.bool) if holes is None else ~holes
        # Positions of a head grow by 1 to 3 a slot, as after evictions, and end at the newest token.
        steps = torch.randint(1, 4, (batch, heads, slots), generator=draw) * valid
        places = steps.cumsum(dim=-1)
        newest = places.amax(dim=(1, 2)) + 1
        positions = torch.where(valid, places - places[..., -1:] + newest[:, None, None] - 1, -1)
        keys = torch.randn(batch, heads, slots, head_dim, generator=draw)
        values = torch.randn(batch, heads, slots, head_dim, generator=draw)
        queries = torch.randn(batch, heads * group, window, head_dim, generator=draw) * 2
        empty = ~valid[..., None]
        return LayerView(
            keys=keys.masked_fill(empty, float("nan")),
            values=values.masked_fill(empty, float("nan")),
            positions=positions,
            valid=valid,
            scaling=head_dim**-0.5,
            next_position=newest,
            layer_idx=0,
            num_layers=2,
            queries=QueryWindow(queries, newest[:, None] - torch.arange(window, 0, -1)),
            rotary=Rotary(50.0 ** (-torch.arange(0, head_dim // 2, dtype=torch.float64) / (head_dim // 2))),
        )

    return make


@pytest.fixture
def rows_of():
    """One row of a view, all of it or only its valid slots (which must then be as many in every head)."""

    def rows(view, row, packed=False):
        def take(tensor):
            if not packed:
                return tensor[row : row + 1]
            return torch.stack([tensor[row, head][view.valid[row, head]] for head in range(tensor.shape[1])])[None]

        queries = QueryWindow(view.queries.rotated[row : row + 1], view.queries.positions[row : row + 1])
        return LayerView(
            keys=take(view.keys),
            values=take(view.values),
            positions=take(view.positions),
            valid=take(view.valid),
            scaling=view.scaling,
            next_position=view.next_position[row : row + 1],
            layer_idx=view.layer_idx,
            num_layers=view.num_layers,
            queries=queries,
            rotary=view.rotary,
        )

    return rows


@pytest.fixture
def loops():
    """The recommended algorithm for one head, in Python floats and loops."""
    return SimpleNamespace(
        cuts=_cuts, quotas=_quotas, mass=_mass, event=_event, protected=_protected, best_first=_best_first
    )


def _protected(present, keep, sinks, recent, priority):
    """Sinks and recent slots among those that are there, ascending, as far as the budget holds them."""
    if priority == "sink":
        sinks = min(sinks, keep)
        recent = min(recent, keep - sinks)
    else:
        recent = min(recent, keep)
        sinks = min(sinks, keep - recent)
    return set(present[:sinks] + present[max(sinks, len(present) - recent) :])


def _best_first(scores, slots):
    """From the best to the worst; equal scores in the order of slots, NaN last."""
    return sorted(slots, key=lambda slot: (scores[slot] != scores[slot], -scores[slot], slot))


def _normalise(values):
    total = sum(value + 1e-12 for value in values)
    return [(value + 1e-12) / total for value in values]


def _mass(usage, credit, decay, mix, scale="mass"):
    """With scale "usage" evidence and credit are mixed as they were measured, and the sum alone is normalised."""
    shared = _normalise if scale == "mass" else list
    now = shared([max(value, 0.0) if value == value else 0.0 for value in usage])
    old = list(credit) + [0.0] * (len(usage) - len(credit))
    updated = [decay * c + (1 - decay) * m for c, m in zip(old, now)]
    return _normalise([mix * m + (1 - mix) * c for m, c in zip(now, shared(updated))]), updated


def _split(start, end, longest):
    length = end - start
    parts = -(-length // longest)
    sizes = [length // parts + (part < length % parts) for part in range(parts)]
    return [start + sum(sizes[:part]) for part in range(parts)]


def _cuts(mass, segment_mass, shortest, longest):
    slots = len(mass)
    edges, multiple = {0}, 1
    while multiple * segment_mass < 1 - 1e-9:
        running = 0.0
        for slot, value in enumerate(mass):
            running += value
            if running >= multiple * segment_mass - 1e-6:
                if slot + 1 < slots:
                    edges.add(slot + 1)
                break
        multiple += 1
    segments = sorted(edges) + [slots]
    starts = [s for a, b in zip(segments, segments[1:]) for s in _split(a, b, longest)]
    parts = [[a, b] for a, b in zip(starts, starts[1:] + [slots])]
    merged = [parts[0]]
    for part in parts[1:]:
        if merged[-1][1] - merged[-1][0] < shortest:
            merged[-1][1] = part[1]
        else:
            merged.append(part)
    if len(merged) > 1 and slots - merged[-1][0] < shortest:
        merged.pop()
        merged[-1][1] = slots
    return [s for a, b in merged for s in _split(a, b, longest)] + [slots]


def _quotas(lengths, weights, must, keep, floor):
    base = [min(floor, length) for length in lengths]
    low = [max(b, m) for b, m in zip(base, must)]
    total = sum(weights)
    weights = [w / total for w in weights] if total > 0 else [length / sum(lengths) for length in lengths]
    if sum(low) > keep:
        level = max(c for c in range(floor + 1) if sum(max(m, min(b, c)) for m, b in zip(must, base)) <= keep)
        quotas = [max(m, min(b, level)) for m, b in zip(must, base)]
        below = [i for i in range(len(base)) if quotas[i] < base[i]]
        for i in sorted(below, key=lambda i: (-weights[i], i))[: keep - sum(quotas)]:
            quotas[i] += 1
        return quotas
    under, over = 0.0, 1e15

    def fill(theta):
        return [min(max(b + theta * w, lo), length) for b, w, lo, length in zip(base, weights, low, lengths)]

    for _ in range(400):
        middle = (under + over) / 2
        under, over = (middle, over) if sum(fill(middle)) <= keep else (under, middle)
    filled = fill(under)
    quotas = [int(value + 1e-7) for value in filled]
    steps = [round((value - whole) * 2**20) for value, whole in zip(filled, quotas)]
    ranked = sorted(range(len(quotas)), key=lambda i: (-steps[i], -weights[i], i))
    for i in ranked[: keep - sum(quotas)]:
        quotas[i] += 1
    return quotas


def _event(scores, usage, credit, keep, options):
    """Slots, credit of the kept slots, edges and quotas."""
    slots = len(scores)
    mass, updated = _mass(usage, credit, options.credit_decay, options.credit_mix, options.credit_scale)
    edges = _cuts(mass, options.segment_mass, options.min_segment_tokens, options.max_segment_tokens)
    must = _protected(list(range(slots)), keep, options.num_sinks, options.num_recent, options.must_priority)
    segments = list(zip(edges, edges[1:]))
    quotas = _quotas(
        [b - a for a, b in segments],
        [sum(mass[a:b]) for a, b in segments],
        [len(must & set(range(a, b))) for a, b in segments],
        keep,
        options.min_keep_tokens,
    )
    kept = []
    for (a, b), quota in zip(segments, quotas):
        kept += sorted(range(a, b), key=lambda slot: (slot not in must, -scores[slot], slot))[:quota]
    kept.sort()
    return kept, [updated[slot] for slot in kept], edges, quotas
