"""Laws of every evicting allocator in `configs/`, as its YAML states it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvstitch.allocators import EvictingAllocator
from kvstitch.views import QueryWindow

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "allocator"
HEADS = 3
# Every leaf protects 36 slots.
TOO_SMALL = (1, 3, 20, 35)


def build(name: str):
    return instantiate(OmegaConf.load(CONFIGS / f"{name}.yaml"), _convert_="all")


EVICTING = {
    path.stem: allocator
    for path in sorted(CONFIGS.glob("*.yaml"))
    if isinstance(allocator := build(path.stem), EvictingAllocator)
}


@pytest.fixture(params=EVICTING)
def allocator(request):
    return EVICTING[request.param]


@pytest.fixture
def draw(make_view):
    """`draw(slots, padding, seed)` -> a view of two rows, the second with that many empty slots first, and scores."""

    def make(slots, padding=0, seed=0, window=33):
        holes = torch.zeros(2, HEADS, slots, dtype=torch.bool)
        holes[1, :, :padding] = True
        view = make_view(heads=HEADS, slots=slots, window=window, holes=holes, seed=seed)
        scores = torch.rand(2, HEADS, slots, generator=torch.Generator().manual_seed(seed))
        # What stands on empty slots would win if anybody looked.
        return view, scores.masked_fill(~view.valid, torch.inf)

    return make


def own_options(allocator):
    """The allocator that spends the budget: a pyramid hands it on."""
    return getattr(allocator, "allocator", allocator)


def shares_over_heads(allocator):
    return hasattr(own_options(allocator), "mode")


def rows_apart(allocator):
    """The same with a mass curve for each row, where it would share one in the batch as the public code does."""
    if getattr(own_options(allocator), "batch", "per_sample") == "batch_mean":
        return replace(allocator, batch="per_sample", mass_pad="head_max")
    return allocator


def kept_by(selection):
    """Slots that stay visible, `[row][head]`, as the selection lists them."""
    seen = selection.slots >= 0
    if selection.hidden is not None:
        seen = seen & ~selection.hidden
    return [[slots[mask].tolist() for slots, mask in zip(*row)] for row in zip(selection.slots, seen)]


def protected_by(allocator, present, keep):
    """Sinks and recent slots of one head, by the rule who goes without."""
    options = own_options(allocator)
    if options.must_priority == "sink":
        sinks = min(options.num_sinks, keep)
        recent = min(options.num_recent, keep - sinks)
    else:
        recent = min(options.num_recent, keep)
        sinks = min(options.num_sinks, keep - recent)
    return set(present[:sinks]) | set(present[max(sinks, len(present) - recent) :])


def check(allocator, view, selection, keep):
    """Exact budget, ascending slots without a repeat, protected ones kept, empty ones never."""
    kept = kept_by(selection)
    for row, budget in enumerate(keep):
        counts = []
        for head in range(HEADS):
            slots = selection.slots[row, head]
            listed = slots[slots >= 0]
            assert (listed.diff() > 0).all() and (slots[len(listed) :] == -1).all()
            present = torch.where(view.valid[row, head])[0].tolist()
            assert set(kept[row][head]) <= set(present)
            assert protected_by(allocator, present, min(budget, len(present))) <= set(kept[row][head])
            counts.append(len(kept[row][head]))
        expected = min(budget, len(present))
        if shares_over_heads(allocator):
            assert sum(counts) == HEADS * expected
            assert min(counts) >= min(int(own_options(allocator).alpha * budget), len(present))
        else:
            assert counts == [expected] * HEADS


@pytest.mark.parametrize("slots", [120, 137])
@pytest.mark.parametrize("keep", [(37, 37), (90, 48), (48, 90), (1, 3), (20, 35), (36, 119)])
def test_budget_order_and_protection(allocator, draw, slots, keep):
    """At a first event, and at the one after it, with what the first gave for the second."""
    view, scores = draw(slots, padding=21)
    selection = allocator.allocate(view, scores, torch.tensor(keep), {})
    check(allocator, view, selection, keep)
    later, scores = draw(selection.slots.shape[-1] + 40, seed=1)
    # Slots that a head or row does not have stay empty.
    empty = torch.zeros_like(later.valid)
    empty[..., : selection.slots.shape[-1]] = selection.slots < 0
    if selection.hidden is not None:
        empty[..., : selection.slots.shape[-1]] |= selection.hidden
    later = replace(later, valid=~empty, positions=later.positions.masked_fill(empty, -1))
    again = allocator.allocate(later, scores, torch.tensor(keep), selection.state)
    if shares_over_heads(allocator):
        # Heads differ in length by now; only the total is fixed.
        totals = [sum(map(len, row)) for row in kept_by(again)]
        counts = later.valid.sum(-1)
        assert all(total == min(HEADS * budget, int(row.sum())) for total, budget, row in zip(totals, keep, counts))
        return
    check(allocator, later, again, keep)


@pytest.mark.parametrize("keep", TOO_SMALL)
def test_a_budget_below_the_protected_slots_holds_nothing_else(allocator, draw, keep):
    view, scores = draw(120)
    kept = kept_by(allocator.allocate(view, scores, torch.tensor([keep, keep]), {}))
    expected = sorted(protected_by(allocator, list(range(120)), keep))
    assert len(expected) == keep
    assert kept == [[expected] * HEADS] * 2


@pytest.mark.parametrize("keep", [37, 90])
def test_a_row_is_what_it_is_alone(allocator, draw, rows_of, keep):
    allocator = rows_apart(allocator)
    view, scores = draw(121, padding=21)
    both = kept_by(allocator.allocate(view, scores, torch.tensor([keep, keep + 3]), {}))
    for row, budget in enumerate((keep, keep + 3)):
        own = rows_of(view, row)
        alone = kept_by(allocator.allocate(own, scores[row : row + 1], torch.tensor([budget]), {}))
        assert both[row] == alone[0]


def test_padding_is_as_if_it_were_not_there(allocator, draw, rows_of):
    allocator = rows_apart(allocator)
    view, scores = draw(121, padding=21)
    padded = kept_by(allocator.allocate(view, scores, torch.tensor([50, 50]), {}))[1]
    packed = rows_of(view, 1, packed=True)
    alone = kept_by(allocator.allocate(packed, scores[1:, :, 21:].contiguous(), torch.tensor([50]), {}))[0]
    assert [[slot - 21 for slot in head] for head in padded] == alone


@pytest.mark.parametrize("keep", [101, 120])
def test_a_row_with_more_padding_than_room_keeps_its_valid_slots(allocator, draw, keep):
    view, scores = draw(121, padding=21)
    kept = kept_by(allocator.allocate(view, scores, torch.tensor([keep, keep]), {}))
    assert kept[1] == [list(range(21, 121))] * HEADS


@pytest.mark.parametrize("keep", [37, 48])
def test_heads_may_be_permuted(allocator, draw, keep):
    view, scores = draw(121, padding=21)
    order, budget = [2, 0, 1], torch.tensor([keep, keep])
    queries = view.queries.rotated.unflatten(1, (HEADS, -1))[:, order].flatten(1, 2)
    turned = replace(
        view,
        queries=QueryWindow(queries, view.queries.positions),
        **{name: getattr(view, name)[:, order] for name in ("keys", "values", "positions", "valid")},
    )
    kept = kept_by(allocator.allocate(view, scores, budget, {}))
    other = kept_by(allocator.allocate(turned, scores[:, order], budget, {}))
    assert [[row[head] for head in order] for row in kept] == other


@pytest.mark.parametrize("slots", [1, 2, 63])
@pytest.mark.parametrize("more", [0, 1, 500])
def test_a_budget_of_everything_keeps_everything(allocator, draw, slots, more):
    view, scores = draw(slots, window=min(slots, 33))
    kept = kept_by(allocator.allocate(view, scores, torch.tensor([slots + more] * 2), {}))
    assert kept == [[list(range(slots))] * HEADS] * 2
