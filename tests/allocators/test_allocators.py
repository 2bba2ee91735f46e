"""What every allocator owes a press: exact totals, protected slots, padding, independence, and its own rule."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvstitch.allocators import FixedSegments, GlobalTopK, HeadAdaptive, Pyramid, SegmentQuota, mass_segments
from kvstitch.kernels.window_attention import reference as window_attention

FEW = {"num_sinks": 2, "num_recent": 5}
EVERY = {
    "global_topk": GlobalTopK(**FEW),
    "recommended": SegmentQuota.recommended(**FEW, min_segment_tokens=4, window_tokens=6),
    "paper": SegmentQuota.paper(**FEW, min_segment_tokens=4, window_tokens=6),
    "reference": SegmentQuota.reference(**FEW, min_segment_tokens=4, window_tokens=6),
    "fixed": FixedSegments(**FEW, segment_tokens=9, window_tokens=6),
    "ragged": HeadAdaptive(**FEW),
    "pyramid": Pyramid(allocator=GlobalTopK(**FEW)),
}
# The public code mixes the rows of a batch.
ALONE = {name: allocator for name, allocator in EVERY.items() if name != "reference"}


def holes_at_the_front(batch=2, heads=3, slots=60, count=11):
    holes = torch.zeros(batch, heads, slots, dtype=torch.bool)
    holes[0, :, :count] = True
    return holes


def draw_scores(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def kept_by(selection, row, head):
    slots = selection.slots[row, head]
    return slots[slots >= 0].tolist()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("keep", [1, 6, 7, 20, 59])
def test_totals_order_and_protection(make_view, name, keep):
    view = make_view(holes=holes_at_the_front())
    scores = draw_scores((2, 3, 60)).masked_fill(~view.valid, float("nan"))
    selection = EVERY[name].allocate(view, scores, torch.tensor([keep, keep]), {})
    for row, count in ((0, 49), (1, 60)):
        kept = [kept_by(selection, row, head) for head in range(3)]
        assert sum(map(len, kept)) == 3 * min(keep, count)
        for head in range(3):
            present = torch.where(view.valid[row, head])[0].tolist()
            assert kept[head] == sorted(set(kept[head])) and set(kept[head]) <= set(present)
            if name != "reference":
                assert set(present[: min(2, keep)]) <= set(kept[head])
            if keep >= 7:
                assert set(present[-5:]) <= set(kept[head])


@pytest.mark.parametrize("name", ALONE)
def test_rows_are_independent(make_view, rows_of, name):
    view = make_view(holes=holes_at_the_front())
    scores, keep = draw_scores((2, 3, 60)), torch.tensor([21, 34])
    both = ALONE[name].allocate(view, scores, keep, {})
    for row in range(2):
        single = ALONE[name].allocate(rows_of(view, row), scores[row : row + 1], keep[row : row + 1], {})
        for head in range(3):
            assert kept_by(both, row, head) == kept_by(single, 0, head)


@pytest.mark.parametrize("name", EVERY)
def test_one_token_and_budgets_beyond_the_cache(make_view, name):
    for slots in (1, 13):
        view = make_view(slots=slots, window=1)
        selection = EVERY[name].allocate(view, draw_scores((2, 3, slots)), torch.tensor([slots, slots + 9]), {})
        assert all(kept_by(selection, row, head) == list(range(slots)) for row in range(2) for head in range(3))


@pytest.mark.parametrize("name", EVERY)
def test_layers_together_equal_layers_one_by_one(make_view, name):
    views = [make_view(seed=seed, batch=1) for seed in range(3)]
    scores = [draw_scores((1, 3, 60), seed) for seed in range(3)]
    together = EVERY[name].allocate_layers(views, scores, [torch.tensor([25])] * 3, [{}] * 3)
    for view, own, selection in zip(views, scores, together):
        assert torch.equal(selection.slots, EVERY[name].allocate(view, own, torch.tensor([25]), {}).slots)


class NoReadBack(TorchDispatchMode):
    """Counts operators; refuses those that bring a value to the host or whose result's shape depends on values."""

    REFUSED = {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
    }

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.REFUSED
        if function.overloadpacket.__name__ == "index":
            assert all(index is None or index.dtype != torch.bool for index in args[1])
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EVERY)
def test_no_read_back_and_no_loop_over_rows_heads_or_segments(make_view, name, monkeypatch):
    # Two looks that spare work where looking costs nothing, on a CPU; on a GPU they answer this without one.
    monkeypatch.setattr(mass_segments, "unless_full", lambda valid: valid)
    monkeypatch.setattr(window_attention, "_first_hidden", lambda missed: 0)
    counts = []
    for batch, heads, slots in ((2, 2, 60), (3, 5, 60), (3, 5, 63)):
        view = make_view(batch=batch, heads=heads, slots=slots)
        keep = torch.full((batch,), 21)
        with NoReadBack() as calls:
            EVERY[name].allocate(view, draw_scores((batch, heads, slots)), keep, {})
        counts.append(calls.count)
    assert counts[0] == counts[1] == counts[2]


# -- global top-k -------------------------------------------------------------------------------------------------


def test_global_topk_by_hand(make_view):
    view = make_view(batch=1, heads=1, slots=8)
    scores = torch.tensor([0.0, 9.0, 5.0, 9.0, 5.0, 5.0, 1.0, 0.0])[None, None]
    allocator = GlobalTopK(num_sinks=1, num_recent=1)
    assert allocator.allocate(view, scores, torch.tensor([6]), {}).slots.tolist() == [[[0, 1, 2, 3, 4, 7]]]


def test_who_goes_without_is_a_choice(make_view):
    view, scores, keep = make_view(batch=1, heads=1, slots=20), draw_scores((1, 1, 20)), torch.tensor([4])
    slots = {
        priority: GlobalTopK(num_sinks=3, num_recent=3, must_priority=priority).allocate(view, scores, keep, {}).slots
        for priority in ("sink", "suffix")
    }
    assert slots["sink"].tolist() == [[[0, 1, 2, 19]]] and slots["suffix"].tolist() == [[[0, 17, 18, 19]]]


# -- head adaptive ------------------------------------------------------------------------------------------------


def by_hand(scores, keep, alpha):
    """AdaKV for one row without protected slots: counts per head."""
    heads, slots = scores.shape
    own = int(alpha * keep)
    best = [scores[head].sort(descending=True).indices[:own].tolist() for head in range(heads)]
    chosen = {(head, slot) for head in range(heads) for slot in best[head]}
    rest = sorted(
        ((head, slot) for head in range(heads) for slot in range(slots) if (head, slot) not in chosen),
        key=lambda at: -scores[at],
    )
    return chosen | set(rest[: heads * keep - len(chosen)])


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
def test_heads_share_one_budget(make_view, alpha):
    view = make_view()
    scores = draw_scores((2, 3, 60)) * torch.tensor([1.0, 3.0, 0.5])[:, None]
    allocator = HeadAdaptive(alpha=alpha, num_sinks=0, num_recent=0)
    selection = allocator.allocate(view, scores, torch.tensor([16, 25]), {})
    for row, keep in ((0, 16), (1, 25)):
        kept = {(head, slot) for head in range(3) for slot in kept_by(selection, row, head)}
        assert kept == by_hand(scores[row], keep, alpha)
        assert selection.details["counts"][row].sum() == 3 * keep
        assert selection.details["counts"][row].min() >= int(alpha * keep)


def test_one_head_may_get_all_that_the_others_do_not_guard(make_view):
    view = make_view(batch=1, slots=90)
    scores = torch.zeros(1, 3, 90)
    scores[:, 1] = 1.0
    selection = HeadAdaptive(alpha=0.2, num_sinks=0, num_recent=0).allocate(view, scores, torch.tensor([30]), {})
    assert selection.details["counts"].tolist() == [[6, 78, 6]]


def test_masking_hides_what_ragged_heads_drop(make_view):
    view, scores, keep = make_view(holes=holes_at_the_front()), draw_scores((2, 3, 60)), torch.tensor([20, 30])
    ragged = HeadAdaptive(**FEW).allocate(view, scores, keep, {})
    mask = HeadAdaptive(**FEW, mode="mask").allocate(view, scores, keep, {})
    assert torch.equal(mask.slots, torch.arange(60).expand(2, 3, -1))
    for row in range(2):
        for head in range(3):
            assert torch.where(~mask.hidden[row, head])[0].tolist() == kept_by(ragged, row, head)


# -- pyramid ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3, 28, 30])
@pytest.mark.parametrize("keep", [1, 4, 35, 36, 37, 40, 128, 1000])
@pytest.mark.parametrize("beta", [1, 2, 20])
def test_layer_budgets_fall_and_sum_exactly(layers, keep, beta):
    pyramid = Pyramid(beta=beta)
    shares = [pyramid.layer_keep(torch.tensor([keep]), layer, layers).item() for layer in range(layers)]
    assert sum(shares) == layers * keep
    assert shares == sorted(shares, reverse=True)
    assert min(shares) >= min(keep, 36)
    if beta == 1:
        assert set(shares) == {keep}


def test_pyramid_by_hand():
    """c = 100 besides the 36 protected: from 2 * 100 - 5 down to 5, by 190 / 4 a layer, rounded in mirrored pairs."""
    shares = [Pyramid().layer_keep(torch.tensor([136]), layer, 5).item() - 36 for layer in range(5)]
    assert shares == [195, 147, 100, 53, 5]


def test_pyramid_passes_on_what_its_allocator_is(make_view):
    inner = SegmentQuota(**FEW, min_segment_tokens=4, window_tokens=6)
    pyramid = Pyramid(allocator=inner)
    assert (pyramid.num_sinks, pyramid.num_recent, pyramid.needs) == (2, 5, inner.needs)
    view, scores, keep = make_view(), draw_scores((2, 3, 60)), torch.tensor([20, 20])
    assert torch.equal(pyramid.allocate(view, scores, keep, {}).slots, inner.allocate(view, scores, keep, {}).slots)
    with pytest.raises(ValueError, match="a Pyramid inside a Pyramid"):
        Pyramid(allocator=pyramid)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: GlobalTopK(num_sinks=-1), "num_sinks must be at least 0"),
        (lambda: GlobalTopK(must_priority="sinks"), "did you mean 'sink'"),
        (lambda: HeadAdaptive(alpha=2.0), r"alpha must be in \[0, 1\]"),
        (lambda: HeadAdaptive(mode="masked"), "did you mean 'mask'"),
        (lambda: Pyramid(beta=0), "beta must be at least 1"),
        (lambda: FixedSegments(segment_tokens=0), "segment_tokens must be at least 1"),
        (lambda: FixedSegments(quota="waterfill"), "quota must be one of 'mass', 'length', 'reference'"),
    ],
)
def test_bad_options_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# -- what is spared where no slot is empty ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recommended", "paper", "reference", "fixed"])
def test_sparing_the_work_for_holes_changes_nothing(make_view, name, monkeypatch):
    view, scores, keep = make_view(), draw_scores((2, 3, 60)), torch.tensor([20, 31])
    looked = EVERY[name].allocate(view, scores, keep, {})
    monkeypatch.setattr(mass_segments, "unless_full", lambda valid: valid)
    monkeypatch.setattr(window_attention, "_first_hidden", lambda missed: 0)
    plain = EVERY[name].allocate(view, scores, keep, {})
    assert torch.equal(looked.slots, plain.slots) and torch.equal(looked.state["credit"], plain.state["credit"])
    assert all(torch.equal(looked.details[part], plain.details[part]) for part in plain.details)
