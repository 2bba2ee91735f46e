"""Laws of every scorer with every evicting allocator, both as their YAML states them, on layers without a model."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvstitch.allocators import EvictingAllocator
from kvstitch.views import QueryStatistics, QueryWindow

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HEADS, GROUP, DIMS = 3, 2, 8


def leaves(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@cache
def build(group, name):
    if name == "kvpress" and find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")
    return instantiate(OmegaConf.load(CONFIGS / group / f"{name}.yaml"), _convert_="all")


ALLOCATORS = [name for name in leaves("allocator") if isinstance(build("allocator", name), EvictingAllocator)]
# The public code shares one mass curve in the batch; that is one of the things it replays.
BATCH_COUPLED = {"segment_quota_reference"}


@pytest.fixture(params=leaves("scorer"))
def scorer(request):
    return build("scorer", request.param)


@pytest.fixture(params=ALLOCATORS)
def allocator(request):
    return build("allocator", request.param)


@pytest.fixture
def draw(make_view):
    """`draw(slots, padding, alike)` -> two rows, the second with that many empty slots first. `alike`: all heads hold
    the same tokens."""

    def make(slots, padding=0, alike=False):
        holes = torch.zeros(2, HEADS, slots, dtype=torch.bool)
        holes[1, :, :padding] = True
        view = make_view(heads=HEADS, group=GROUP, slots=slots, window=min(slots, 40), head_dim=DIMS, holes=holes)
        generator = torch.Generator().manual_seed(slots)
        planes = torch.randn(2, HEADS * GROUP, 30, DIMS // 2, 2, generator=generator)
        planes = torch.view_as_complex(planes) + 1
        statistics = QueryStatistics(
            torch.tensor([30, 30]), planes.sum(2), planes.abs().sum(2), planes.abs().square().sum(2)
        )
        if alike:
            view = replace(view, positions=view.positions[:, :1].expand(-1, HEADS, -1).contiguous())
        return replace(view, statistics=statistics)

    return make


def row_of(view, row):
    """One row of a view alone."""
    rows = slice(row, row + 1)
    tensors = {name: getattr(view, name)[rows] for name in ("keys", "values", "positions", "valid", "next_position")}
    queries = QueryWindow(view.queries.rotated[rows], view.queries.positions[rows])
    statistics = QueryStatistics(**{name: tensor[rows] for name, tensor in vars(view.statistics).items()})
    return replace(view, queries=queries, statistics=statistics, **tensors)


def kept_by(scorer, allocator, view, keep):
    """Slots that each row and head still attends to."""
    selection = allocator.allocate(view, scorer.score(view), torch.tensor(keep), {})
    seen = selection.slots >= 0
    if selection.hidden is not None:
        seen = seen & ~selection.hidden
    return [[slots[mask].tolist() for slots, mask in zip(*row)] for row in zip(selection.slots, seen)]


def own_options(allocator):
    """The allocator that spends the budget: a pyramid hands it on."""
    return getattr(allocator, "allocator", allocator)


def protected_of(allocator, present, budget):
    """Sinks and recent slots of one head, by the rule who goes without."""
    options = own_options(allocator)
    if options.must_priority == "sink":
        sinks = min(options.num_sinks, budget)
        recent = min(options.num_recent, budget - sinks)
    else:
        recent = min(options.num_recent, budget)
        sinks = min(options.num_sinks, budget - recent)
    return set(present[:sinks]) | set(present[max(sinks, len(present) - recent) :])


@pytest.mark.parametrize("slots, padding", [(1, 0), (63, 9)])
def test_budget_order_protection_and_padding(scorer, allocator, draw, slots, padding):
    view = draw(slots, padding)
    for keep in ([max(1, slots - 20), 40], [slots, slots + 5]):
        kept = kept_by(scorer, allocator, view, keep)
        for row, budget in enumerate(keep):
            present = torch.where(view.valid[row, 0])[0].tolist()
            room = min(budget, len(present))
            for slots_kept in kept[row]:
                assert slots_kept == sorted(set(slots_kept)) and set(slots_kept) <= set(present)
                assert protected_of(allocator, present, room) <= set(slots_kept)
            counts = [len(slots_kept) for slots_kept in kept[row]]
            assert sum(counts) == HEADS * room, "the total is exact"
            assert hasattr(own_options(allocator), "mode") or counts == [room] * HEADS


def test_a_row_is_what_it_is_alone(request, scorer, allocator, draw):
    if request.node.callspec.params["allocator"] in BATCH_COUPLED:
        allocator = replace(allocator, batch="per_sample", mass_pad="head_max")
    view = draw(63, padding=9)
    together = kept_by(scorer, allocator, view, [45, 41])
    for row, budget in enumerate((45, 41)):
        assert kept_by(scorer, allocator, row_of(view, row), [budget]) == [together[row]]


def test_heads_may_be_permuted(scorer, allocator, draw):
    # Where heads share a budget and some scores are one and the same in all of them, ties go to the lower head.
    view, order = draw(63, padding=9, alike=hasattr(own_options(allocator), "mode")), [2, 0, 1]

    def turned(x):
        return x.unflatten(1, (HEADS, -1))[:, order].flatten(1, 2)

    queries = QueryWindow(turned(view.queries.rotated), view.queries.positions)
    sums = {name: turned(getattr(view.statistics, name)) for name in ("total", "modulus", "square")}
    other = replace(
        view,
        queries=queries,
        statistics=replace(view.statistics, **sums),
        **{name: getattr(view, name)[:, order] for name in ("keys", "values", "positions", "valid")},
    )
    kept = kept_by(scorer, allocator, view, [45, 41])
    assert kept_by(scorer, allocator, other, [45, 41]) == [[row[head] for head in order] for row in kept]
