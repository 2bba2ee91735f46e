"""Window evidence against its definition, in loops, for every switch."""

import dataclasses

import pytest
import torch

from kvstitch.allocators import SegmentQuota

W, SINKS = 6, 3


def by_loops(view, row, head, options, keep):
    """Evidence of one head in Python floats, and the slots that count as history."""
    present = torch.where(view.valid[row, head])[0].tolist()
    window = list(range(view.queries.positions.shape[1]))[-W:]
    if options.window_step > 1:
        places = view.queries.positions[row].tolist()
        window = [w for w in window if (places[w] + 1) % options.window_step == 0 or w == len(places) - 1]
        count = -(-W // options.window_step)
        window = window[-count:]
    length = len(window)
    if options.mass_pad != "visible_mean":
        length = max(1, min(length, len(present) - 1, keep))
        window = window[len(window) - length :]
    group = view.queries.rotated.shape[1] // view.keys.shape[1]
    mean = dict.fromkeys(present, 0.0)
    for g in range(group):
        total, watchers = dict.fromkeys(present, 0.0), dict.fromkeys(present, 0)
        for w in window:
            place = int(view.queries.positions[row, w])
            query = view.queries.rotated[row, head * group + g, w]
            if options.query_positions == "current":
                query = turn(query, int(view.queries.positions[row, -1]) - place, view.rotary.inverse_frequencies)
            seen = [slot for slot in present if view.positions[row, head, slot] <= place]
            logits = [view.scaling * float(query.double() @ view.keys[row, head, slot].double()) for slot in seen]
            for slot, probability in zip(seen, torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()):
                total[slot] += probability
                watchers[slot] += 1
        for slot in present:
            mean[slot] += total[slot] / max(watchers[slot], 1) / group
    first = SINKS if options.sink_mass == "exclude" else 0
    end = len(present) if options.mass_pad == "visible_mean" else len(present) - length
    counted = [mean[slot] if first <= place < end else None for place, slot in enumerate(present)]
    return present, pool(counted, options), end


def pool(counted, options):
    half, pooled = options.pool_kernel // 2, []
    for place, value in enumerate(counted):
        near = [x for x in counted[max(0, place - half) : place + half + 1] if x is not None]
        divisor = options.pool_kernel if options.pool_edges == "zero" else max(len(near), 1)
        pooled.append(0.0 if value is None else sum(near) / divisor)
    return pooled


def turn(query, steps, frequencies):
    count = len(frequencies)
    turned = query.double().clone()
    for f, frequency in enumerate(frequencies.tolist()):
        angle = torch.tensor(steps * frequency, dtype=torch.float64)
        turned[f] = query[f] * angle.cos() - query[f + count] * angle.sin()
        turned[f + count] = query[f + count] * angle.cos() + query[f] * angle.sin()
    return turned


@pytest.mark.parametrize("mass_pad", ["visible_mean", "head_max", "global_max"])
@pytest.mark.parametrize("sink_mass", ["exclude", "include"])
@pytest.mark.parametrize("pool_edges, pool_kernel", [("valid", 5), ("zero", 5), ("valid", 1), ("zero", 3)])
@pytest.mark.parametrize("query_positions", ["own", "current"])
def test_equals_its_loops(make_view, mass_pad, sink_mass, pool_edges, pool_kernel, query_positions):
    holes = torch.zeros(2, 2, 30, dtype=torch.bool)
    holes[0, :, :5] = True
    holes[0, 0, 12:14] = holes[0, 1, 20:22] = True
    view = make_view(heads=2, slots=30, window=W + 2, holes=holes)
    options = SegmentQuota(
        mass_pad=mass_pad,
        sink_mass=sink_mass,
        pool_edges=pool_edges,
        pool_kernel=pool_kernel,
        query_positions=query_positions,
        window_tokens=W,
        window_step=1,
        num_sinks=SINKS,
    )
    require_equal(view, options)


@pytest.mark.parametrize("step", [2, 3, 4, 6, 9])
def test_a_stepped_window_equals_its_loops(make_view, step):
    view = make_view(heads=2, slots=30, window=W + 2)
    allocator = SegmentQuota(window_tokens=W, window_step=step, num_sinks=SINKS)
    require_equal(view, allocator)
    # What a press has put aside says the same as the whole window.
    keep = torch.tensor([4, 12])
    expected = allocator._evidence.of_layers([view], view.valid, keep)
    # One that somebody else asked for may reach further back.
    for tokens in (W, W + 2):
        alone = dataclasses.replace(view, queries=None, spaced=view.queries.spaced(step, tokens))
        evidence = allocator._evidence.of_layers([alone], view.valid, keep)
        torch.testing.assert_close(evidence, expected, rtol=1e-6, atol=1e-8)


def require_equal(view, options):
    keep = torch.tensor([4, 12])
    usage = options._evidence.of_layers([view], view.valid, keep)
    expected = {
        (row, head): by_loops(view, row, head, options, int(keep[row])) for row in range(2) for head in range(2)
    }
    everywhere = max(max(pooled) for _, pooled, _ in expected.values())
    for (row, head), (present, pooled, end) in expected.items():
        peak = everywhere if options.mass_pad == "global_max" else max(pooled)
        wanted = torch.zeros(30)
        wanted[present] = torch.tensor([value if place < end else peak for place, value in enumerate(pooled)])
        torch.testing.assert_close(usage[row, head], wanted, rtol=1e-4, atol=1e-6)


def test_rows_without_queries_have_no_evidence(make_view):
    """They get uniform mass, and everything stays finite."""
    view = make_view(batch=1, slots=40)
    nothing = dataclasses.replace(view.queries, positions=torch.full_like(view.queries.positions, -1))
    view = dataclasses.replace(view, queries=nothing)
    scores = torch.rand(1, 3, 40, generator=torch.Generator().manual_seed(0))
    allocator = SegmentQuota(min_segment_tokens=4, num_sinks=0, num_recent=0, segment_mass=0.25)
    selection = allocator.allocate(view, scores, torch.tensor([20]), {})
    assert selection.details["boundaries"][0, 0, :5].tolist() == [0, 10, 20, 30, 40]
    assert selection.details["quotas"][0, 0, :4].tolist() == [5, 5, 5, 5]


def test_what_the_view_lacks_is_said(make_view):
    view = make_view()
    scores, keep = torch.zeros(2, 3, 60), torch.tensor([20, 20])
    with pytest.raises(ValueError, match="the view holds no queries; this allocator needs the last 128"):
        SegmentQuota().allocate(dataclasses.replace(view, queries=None), scores, keep, {})
    with pytest.raises(ValueError, match="query_positions='current' needs the model's rotary"):
        SegmentQuota.reference().allocate(dataclasses.replace(view, rotary=None), scores, keep, {})
