"""SegmentQuota against its loop-written form, its credit over events, its options and its place behind a view."""

import dataclasses
import random

import pytest
import torch

from kvstitch.allocators import FixedSegments, SegmentQuota
from kvstitch.allocators.segment_quota import public_target
from kvstitch.kernels.segment_quota.quotas import water_fill
from kvstitch.views import Needs

SMALL = {"min_segment_tokens": 4, "max_segment_tokens": 24, "num_sinks": 2, "num_recent": 5}


def draw_usage(kind, shape, draw):
    noise = torch.rand(shape, generator=draw)
    if kind == "spiky":
        return noise**12
    if kind == "front":
        return noise * torch.exp(-torch.arange(shape[-1]) / 6)
    if kind == "zero":
        return torch.zeros(shape)
    return noise


@pytest.mark.parametrize("kind", ["even", "spiky", "front", "zero"])
@pytest.mark.parametrize("floor, keep", [(1, 30), (1, 9), (6, 31), (8, 12)])
def test_equals_the_loops_over_two_events(loops, kind, floor, keep):
    draw = torch.Generator().manual_seed(len(kind) + keep)
    allocator = SegmentQuota(**SMALL, min_keep_tokens=floor, segment_mass=0.07)
    credit = None
    for slots in (97, keep + 41):
        shape = (2, 3, slots)
        scores, usage = torch.randn(shape, generator=draw), draw_usage(kind, shape, draw)
        result = allocator.select(scores, usage, keep, credit)
        for row in range(2):
            for head in range(3):
                old = [] if credit is None else credit[row, head].tolist()
                arrived = scores[row, head].tolist(), usage[row, head].tolist()
                kept, left, edges, quotas = loops.event(*arrived, old, keep, allocator)
                assert [edge for edge in result.boundaries[row, head].tolist() if edge >= 0] == edges
                assert [quota for quota in result.quotas[row, head].tolist() if quota >= 0] == quotas
                assert result.slots[row, head].tolist() == kept
                torch.testing.assert_close(result.credit[row, head], torch.tensor(left))
        credit = result.credit


@pytest.mark.parametrize("seed", range(4))
def test_water_filling_equals_its_loops(loops, seed):
    draw = random.Random(seed)
    for _ in range(60):
        number = draw.randint(1, 12)
        lengths = [draw.randint(0, 30) for _ in range(number)] + [5]
        weights = [draw.choice([0.5, 1e-6 + draw.random() ** 4]) for _ in lengths]
        must = [draw.randint(0, min(length, 3)) for length in lengths]
        keep, floor = draw.randint(max(1, sum(must)), sum(lengths)), draw.randint(0, 7)
        if draw.random() < 0.2:
            weights = [0.0] * len(lengths)
        rows = [torch.tensor(row, dtype=torch.float64)[None, None] for row in (lengths, weights, must, [keep])]
        assert water_fill(*rows, floor)[0, 0].tolist() == loops.quotas(lengths, weights, must, keep, floor)


def test_a_budget_met_exactly_where_nothing_rises():
    """Segment 0 is full, segment 1 still at its protected slots: no slope, and rounding must not pretend one."""
    draw = random.Random(3)
    for _ in range(300):
        length, protected = draw.randint(1, 40), draw.randint(30, 60)
        rows = ([length, 90], [draw.random(), 1e-4 * draw.random()], [0, protected], [length + protected])
        tensors = [torch.tensor(row, dtype=torch.float64)[None, None] for row in rows]
        assert water_fill(*tensors, 1)[0, 0].tolist() == [length, protected]


def test_many_segments_are_filled_as_few_are(loops):
    """Beyond some number of segments only the bends near the answer are evaluated."""
    draw = random.Random(7)
    lengths = [draw.randint(0, 30) for _ in range(700)]
    weights, must = (
        [1e-6 + draw.random() ** 4 for _ in lengths],
        [min(length, draw.randint(0, 1)) for length in lengths],
    )
    for keep in (sum(must) + 1, 1000, sum(lengths) // 2, sum(lengths)):
        rows = [torch.tensor(row, dtype=torch.float64)[None, None] for row in (lengths, weights, must, [keep])]
        assert water_fill(*rows, 1)[0, 0].tolist() == loops.quotas(lengths, weights, must, keep, 1)


def test_credit_follows_tokens_by_identity_over_events():
    """A dictionary keyed by token id, kept aside, holds what the slots hold after each of five events."""
    draw = torch.Generator().manual_seed(5)
    allocator, keep, heads = SegmentQuota(**SMALL), 24, 2
    tokens = torch.arange(40).expand(1, heads, -1)
    book = [dict() for _ in range(heads)]
    credit = None
    for event in range(5):
        shape = tokens.shape
        usage = torch.rand(shape, generator=draw, dtype=torch.float64) ** 3
        result = allocator.select(torch.randn(shape, generator=draw), usage.float(), keep, credit)
        mass = usage.float().double() + 1e-12
        mass = mass / mass.sum(dim=-1, keepdim=True)
        for head in range(heads):
            for slot, token in enumerate(tokens[0, head].tolist()):
                book[head][token] = 0.9 * book[head].get(token, 0.0) + 0.1 * mass[0, head, slot].item()
        tokens, credit = tokens.gather(-1, result.slots), result.credit
        for head in range(heads):
            expected = torch.tensor([book[head][token] for token in tokens[0, head].tolist()])
            torch.testing.assert_close(credit[0, head], expected, rtol=1e-5, atol=1e-9)
        new = torch.arange(100 * event + 1000, 100 * event + 1016).expand(1, heads, -1)
        tokens = torch.cat((tokens, new), dim=-1)


def test_the_mix_has_no_effect_at_the_first_event():
    draw = torch.Generator().manual_seed(1)
    scores, usage = torch.randn(1, 2, 90, generator=draw), torch.rand(1, 2, 90, generator=draw)
    first = [SegmentQuota(**SMALL, credit_mix=mix).select(scores, usage, 30) for mix in (0.1, 0.9)]
    assert torch.equal(first[0].slots, first[1].slots)
    second = [
        SegmentQuota(**SMALL, credit_mix=mix).select(scores, usage.flip(-1), 30, first[0].credit) for mix in (0.1, 0.9)
    ]
    assert not torch.equal(second[0].boundaries, second[1].boundaries)


def test_the_public_no_mass_ablation_differs_in_the_weight_of_credit_only():
    """Its first event is the full method's; later ones weigh earlier evidence as it was measured."""
    draw = torch.Generator().manual_seed(8)
    scores, usage = torch.randn(1, 2, 90, generator=draw), torch.rand(1, 2, 90, generator=draw)
    mass, raw = (SegmentQuota(**SMALL, credit_scale=scale, credit_mix=0.3) for scale in ("mass", "usage"))
    first = mass.select(scores, usage, 30), raw.select(scores, usage, 30)
    assert torch.equal(first[0].slots, first[1].slots)
    torch.testing.assert_close(first[1].credit, 0.1 * usage.gather(-1, first[1].slots))
    # New evidence ten times weaker: history outweighs it only where evidence is added up as it is.
    second = [one.select(scores, usage.flip(-1) / 10, 30, result.credit) for one, result in zip((mass, raw), first)]
    assert not torch.equal(second[0].boundaries, second[1].boundaries)


def test_credit_can_start_at_the_mass_or_be_off():
    draw = torch.Generator().manual_seed(2)
    scores, usage = torch.randn(1, 2, 50, generator=draw), torch.rand(1, 2, 50, generator=draw)
    share = usage / usage.sum(dim=-1, keepdim=True)
    zero, mass = (SegmentQuota(**SMALL, credit_init=start).select(scores, usage, 20) for start in ("zero", "mass"))
    torch.testing.assert_close(zero.credit, 0.1 * share.gather(-1, zero.slots))
    torch.testing.assert_close(mass.credit, share.gather(-1, mass.slots))
    old = torch.rand(1, 2, 20, generator=draw)
    off = SegmentQuota(**SMALL, credit=False)
    assert torch.equal(off.select(scores, usage, 20, old).slots, off.select(scores, usage, 20).slots)
    assert off.select(scores, usage, 20, old).credit.abs().max() == 0


def test_quota_by_length_ignores_the_mass_of_a_segment():
    usage = torch.full((1, 1, 100), 0.01)
    usage[..., :50] = 1.0
    options = {"segment_tokens": 50, "num_sinks": 0, "num_recent": 0, "credit": False}
    scores = torch.zeros_like(usage)
    assert FixedSegments(**options, quota="length").select(scores, usage, 40).quotas[0, 0, :2].tolist() == [20, 20]
    # floors 1 + 1, then 38 by mass 100 : 1
    assert FixedSegments(**options, quota="mass").select(scores, usage, 40).quotas[0, 0, :2].tolist() == [39, 1]


def test_protected_slots_can_be_set_aside_before_sharing():
    usage = torch.ones(1, 1, 40)
    options = {"segment_tokens": 10, "num_sinks": 4, "num_recent": 6, "credit": False}
    scores = torch.arange(40.0)[None, None]
    counted = FixedSegments(**options).select(scores, usage, 18)
    separate = FixedSegments(**options, must_keep="first_separate").select(scores, usage, 18)
    # counted: base 1, so theta is spent by segments 0 to 2 up to their 4, 4, 4 and segment 3 stays at its 6 protected
    assert counted.quotas[0, 0, :4].tolist() == [4, 4, 4, 6]
    # separate: 8 slots besides the 10 protected, 2 a segment
    assert separate.quotas[0, 0, :4].tolist() == [6, 2, 2, 8]


def test_infeasible_floors_are_reported():
    usage = torch.tensor([0.4, 0.3, 0.2, 0.1]).repeat_interleave(8)[None, None]
    allocator = FixedSegments(segment_tokens=8, min_keep_tokens=4, num_sinks=0, num_recent=0)
    result = allocator.select(torch.zeros_like(usage), usage, 10)
    assert result.quotas[0, 0].tolist() == [3, 3, 2, 2]
    assert result.floors_missed.tolist() == [[4]]
    assert allocator.select(torch.zeros_like(usage), usage, 16).floors_missed.tolist() == [[0]]


def test_boundaries_are_padded_with_minus_one():
    result = SegmentQuota(**SMALL).select(torch.zeros(1, 1, 30), torch.ones(1, 1, 30), 20)
    edges = result.boundaries[0, 0].tolist()
    used = edges.index(30) + 1
    assert edges[0] == 0 and edges[:used] == sorted(set(edges[:used])) and set(edges[used:]) <= {-1}
    assert result.quotas[0, 0, : used - 1].min() >= 0 and (result.quotas[0, 0, used - 1 :] == -1).all()
    assert result.quotas.clamp(min=0).sum() == 20


def test_public_target_is_one_more_for_about_a_third_of_the_lengths():
    """Counted in the public code over many lengths and targets: 30 %, none one interval after the target."""
    pairs = [(target, length) for target in (128, 256, 512, 1024) for length in range(target + 1, target + 2000, 7)]
    more = [public_target(target, length) - target for target, length in pairs]
    assert set(more) == {0, 1} and 0.25 < sum(more) / len(more) < 0.4
    assert all(public_target(target, target + 512) == target for target in (256, 512, 1024))
    length = next(length for length in range(300, 400) if public_target(256, length) == 257)
    scores = torch.rand(1, 1, length)
    for exact, kept in ((True, 256), (False, 257)):
        assert SegmentQuota.reference(exact_target=exact).select(scores, scores, 256).slots.shape[-1] == kept


# -- behind a view ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["recommended", "paper"])
def test_rows_and_padding_do_not_matter(make_view, rows_of, preset):
    """Each row of a batch with holes gets what its valid slots alone get."""
    holes = torch.zeros(2, 3, 70, dtype=torch.bool)
    holes[0, :, :13] = True
    holes[0, 0, 50:57] = holes[0, 1, 20:27] = holes[0, 2, 63:] = True
    view = make_view(slots=70, holes=holes)
    scores = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(3)).masked_fill(holes, float("nan"))
    allocator = getattr(SegmentQuota, preset)(**SMALL, window_tokens=8)
    keep = torch.tensor([23, 31])
    whole = allocator.allocate(view, scores, keep, {})
    for row in range(2):
        alone = rows_of(view, row, packed=True)
        own = torch.stack([scores[row, head][view.valid[row, head]] for head in range(3)])[None]
        result = allocator.allocate(alone, own, keep[row : row + 1], {})
        width = int(keep[row])
        for head in range(3):
            original = torch.where(view.valid[row, head])[0]
            assert whole.slots[row, head, :width].tolist() == original[result.slots[0, head]].tolist()
        assert (whole.slots[row, :, width:] == -1).all()
        # The products behind usage are as wide as the cache: equal up to rounding.
        torch.testing.assert_close(whole.state["credit"][row, :, :width], result.state["credit"][0])
        assert torch.equal(
            whole.details["boundaries"][row][result.details["boundaries"][0] >= 0],
            result.details["boundaries"][0][result.details["boundaries"][0] >= 0],
        )


@pytest.mark.parametrize("start", ["zero", "mass"])
def test_stacked_layers_equal_single_ones(make_view, start):
    """Whatever differs between them: budgets, lengths, and whether there was an event before."""
    allocator = SegmentQuota(**SMALL, window_tokens=8, credit_init=start)
    views = [make_view(seed=seed, slots=slots) for seed, slots in enumerate((60, 60, 60, 60, 51, 51))]
    draw = torch.Generator().manual_seed(0)
    scores = [torch.randn(view.valid.shape, generator=draw) for view in views]
    keeps = [torch.tensor(pair) for pair in ((20, 30), (25, 25), (12, 59), (60, 61), (20, 20), (9, 30))]
    states = [{}, {}] + [{"credit": torch.rand(2, 3, width, generator=draw)} for width in (20, 20, 20, 30)]
    layers = list(zip(views, scores, keeps, states))
    for layer, stacked in zip(layers, allocator.allocate_layers(views, scores, keeps, states)):
        single = allocator.allocate(*layer)
        assert torch.equal(stacked.slots, single.slots)
        torch.testing.assert_close(stacked.state["credit"], single.state["credit"])
        for name in ("boundaries", "quotas", "floors_missed"):
            assert torch.equal(stacked.details[name], single.details[name])


def test_layers_of_the_public_code_are_never_stacked(make_view):
    """Its rows depend on each other; stacked layers would, too."""
    allocator = SegmentQuota.reference(**{**SMALL, "max_segment_tokens": 60}, window_tokens=8)
    views = [make_view(seed=seed, batch=1) for seed in range(2)]
    scores = [torch.randn(1, 3, 60, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    both = allocator.allocate_layers(views, scores, [torch.tensor([20])] * 2, [{}, {}])
    for number in range(2):
        single = allocator.allocate(views[number], scores[number], torch.tensor([20]), {})
        assert torch.equal(both[number].slots, single.slots)
        assert torch.equal(both[number].details["boundaries"], single.details["boundaries"])


def test_a_head_that_fits_keeps_all_and_its_credit():
    draw = torch.Generator().manual_seed(4)
    scores, usage = torch.randn(2, 2, 40, generator=draw), torch.rand(2, 2, 40, generator=draw)
    credit = torch.rand(2, 2, 30, generator=draw)
    result = SegmentQuota(**SMALL).select(scores, usage, torch.tensor([40, 15]), credit)
    assert torch.equal(result.slots[0], torch.arange(40).expand(2, -1))
    assert torch.equal(result.credit[0], torch.nn.functional.pad(credit[0], (0, 10)))
    assert (result.slots[1, :, 15:] == -1).all() and (result.credit[1, :, 15:] == 0).all()


# -- options ------------------------------------------------------------------------------------------------------

TABLE = {
    "window_tokens": (128, 32, 128),
    "window_step": (1, 1, 8),
    "pool_kernel": (5, 5, 5),
    "query_positions": ("own", "current", "own"),
    "mass_pad": ("head_max", "global_max", "visible_mean"),
    "pool_edges": ("zero", "zero", "valid"),
    "sink_mass": ("include", "include", "exclude"),
    "segment_mass": (0.1, 0.02, 0.1),
    "min_segment_tokens": (16, 32, 8),
    "max_segment_tokens": (256, 1024, 16),
    "min_keep_tokens": (1, 8, 1),
    "credit_decay": (0.9, 0.8, 0.9),
    "credit_mix": (0.9, 0.7, 0.9),
    "credit": (True, True, True),
    "num_sinks": (4, 4, 4),
    "num_recent": (32, 32, 32),
    "must_keep": ("first_counted", "after", "first_counted"),
    "must_priority": ("sink", "suffix", "sink"),
    "boundary": ("include", "exclude", "include"),
    "split": ("even", "chunk", "even"),
    "merge": ("forward_then_tail", "forward", "forward_then_tail"),
    "quota": ("waterfill", "reference", "waterfill"),
    "batch": ("per_sample", "batch_mean", "per_sample"),
}


@pytest.mark.parametrize("column, preset", enumerate(["paper", "reference", "recommended"]))
def test_presets(column, preset):
    allocator = getattr(SegmentQuota, preset)()
    assert {name: getattr(allocator, name) for name in TABLE} == {name: row[column] for name, row in TABLE.items()}
    assert getattr(SegmentQuota, preset)(num_recent=7).num_recent == 7


def test_the_default_is_recommended():
    assert SegmentQuota() == SegmentQuota.recommended()
    assert dataclasses.replace(SegmentQuota(), num_recent=9) == SegmentQuota(num_recent=9)


def test_needs():
    assert SegmentQuota(window_tokens=17, window_step=1).needs.queries == 17
    assert SegmentQuota(window_tokens=17, window_step=4).needs == Needs(spaced_queries=17, query_step=4)
    assert not SegmentQuota().needs.rotary and SegmentQuota.reference().needs.rotary


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mass_pad": "visible"}, "did you mean 'visible_mean'"),
        ({"must_keep": "never"}, "must_keep must be one of 'first_counted', 'first_separate', 'after'"),
        ({"segment_mass": 0.0}, "segment_mass must be at least 0.001"),
        ({"max_segment_tokens": 15}, "max_segment_tokens must be at least 16"),
        ({"pool_kernel": 4}, "pool_kernel must be odd, got 4; the nearest valid value is 5"),
        ({"num_sinks": -1}, "num_sinks must be at least 0, got -1"),
        ({"window_tokens": 0}, "window_tokens must be at least 1"),
        ({"window_step": 0}, "window_step must be at least 1"),
        ({"mass_pad": "head_max"}, "window_step=8 needs mass_pad='visible_mean'.*set window_step=1"),
        ({"credit_mix": 1.5}, r"credit_mix must be in \[0, 1\], got 1.5; the nearest valid value is 1"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SegmentQuota(**options)


@pytest.mark.parametrize("options", [{"segment_mass": "0.1"}, {"num_recent": 2.0}, {"credit": "off"}])
def test_bad_types_are_refused(options):
    """By the shape checker while the tests run, by our own check otherwise."""
    with pytest.raises(TypeError, match=next(iter(options))):
        SegmentQuota(**options)


def test_bad_arguments_are_refused():
    scores = torch.zeros(1, 2, 10)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        SegmentQuota().select(scores, scores, 0)
    with pytest.raises(ValueError, match="credit must have shape"):
        SegmentQuota().select(scores, scores, 3, torch.zeros(1, 2, 11))
    # The shape checker sees the wrong batch size first.
    with pytest.raises((ValueError, TypeError), match="keep"):
        SegmentQuota().select(scores, scores, torch.tensor([3, 4]))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"keep": 2.5}, TypeError, "keep must be a whole number of slots, or a tensor of them, got 2.5"),
        ({"keep": True}, TypeError, "keep must be a whole number"),
        ({"keep": torch.tensor([7.0])}, TypeError, "keep must be a whole number"),
        ({"keep": 0}, ValueError, "keep must be at least 1"),
        ({"usage": torch.ones(1, 2, 29)}, ValueError, "usage must have the shape of the scores"),
    ],
)
def test_select_names_what_is_wrong_with_its_arguments(change, error, message):
    arguments = {"scores": torch.rand(1, 2, 30), "usage": torch.rand(1, 2, 30), "keep": 9} | change
    # With shape annotations checked, wrong types are caught one step earlier.
    with pytest.raises((error, TypeError)) as caught:
        SegmentQuota.recommended().select(**arguments)
    if "select" not in str(caught.value):
        caught.match(message)
