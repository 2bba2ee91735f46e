"""What a region index reads, against a retrieval written with loops; and what stands in for the rest."""

import math

import pytest
import torch

from kvstitch.allocators.retrieval import ReadPlan
from kvstitch.allocators.retrieval.region_index import RegionIndex, RegionOptions

SINKS, RECENT = 3, 5


def read_sets(layer, reads):
    """Positions that each row and selection retrieved, in reading order; sinks and window checked and left out."""
    batch, selections = reads.slots.shape[:2]
    by_selection = layer.positions.repeat_interleave(selections // layer.heads, dim=1)
    positions = by_selection.gather(2, reads.slots.clamp(min=0)).masked_fill(reads.slots < 0, -1)
    assert reads.complete == bool((positions >= 0).all())
    retrieved = [[None] * selections for _ in range(batch)]
    for row in range(batch):
        for selection in range(selections):
            real = [p for p in positions[row, selection].tolist() if p >= 0]
            assert len(real) == len(set(real)), "no slot twice"
            newest = layer.newest(row)
            fixed = set(range(SINKS)) | set(range(newest - RECENT + 1, newest + 1))
            assert fixed <= set(real)
            retrieved[row][selection] = [p for p in real if p not in fixed]
    return retrieved


@pytest.fixture
def regions():
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, 9, (1, 1, 70), generator=draw) ** 2 // 4


CASES = {
    "mean": dict(combine="mean"),
    "max": dict(combine="max"),
    "softmax_sum": dict(combine="softmax_sum"),
    "query_head": dict(select="query_head"),
    "exact": dict(truncation="exact"),
    "exact_query_head": dict(truncation="exact", select="query_head"),
    "shortlist": dict(shortlist=1.7),
    "shortlist_query_head": dict(shortlist=1.4, select="query_head", combine="max"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", [12, 26, 55])
def test_reads_are_those_of_the_loops(
    make_layer, given_regions, plain_regions, chunk_growth, read_plan, regions, name, budget
):
    options = RegionOptions(**CASES[name])
    layer = make_layer()
    index = given_regions(layer.frame(SINKS), options, chunk_growth(), regions)
    plan = read_plan(budget, SINKS, RECENT)
    layer.permute(index.build(layer.view(), plan))
    plain = [[plain_regions(layer, row, head, regions[0, 0], SINKS, RECENT) for head in range(2)] for row in range(2)]
    # The loops of the shares of all regions are slow.
    for _ in range(4 if name == "softmax_sum" else 14):
        layer.append()
        reads = index.select(layer.step())
        found = read_sets(layer, reads)
        for row in range(2):
            for head in range(2):
                plain[row][head].advance()
            for selection in range(reads.slots.shape[1]):
                per_head = reads.slots.shape[1] // 2
                head, member = divmod(selection, per_head)
                heads = slice(None) if per_head == 1 else slice(member, member + 1)
                wanted = plain[row][head].read(
                    budget - SINKS - RECENT, options.combine, options.truncation, heads, options.shortlist
                )
                assert set(found[row][selection]) == set(wanted)
                assert len(found[row][selection]) == len(wanted)


def test_rows_may_have_budgets_of_their_own(make_layer, given_regions, plain_regions, chunk_growth, regions):
    layer = make_layer()
    index = given_regions(layer.frame(SINKS), RegionOptions(truncation="exact"), chunk_growth(), regions)
    layer.permute(index.build(layer.view(), ReadPlan((31, 19), SINKS, RECENT)))
    for _ in range(3):
        layer.append()
        found = read_sets(layer, index.select(layer.step()))
    for row, count in enumerate((31, 19)):
        for head in range(2):
            plain = plain_regions(layer, row, head, regions[0, 0], SINKS, RECENT)
            plain.regions, plain.last = {}, None
            assert len(found[row][head]) == count - SINKS - RECENT


@pytest.mark.parametrize("shortlist", [1.01, 1.7, 40, 1e300])
@pytest.mark.parametrize("replacement", [0, 4])
def test_a_row_lists_what_it_would_alone(
    make_layer, given_regions, chunk_growth, read_plan, regions, shortlist, replacement
):
    """Its shortlist is as long as its own budget says, whatever the other rows may read."""
    options = RegionOptions(shortlist=shortlist, replacement=replacement, truncation="exact")
    budgets, both = (44, 15), make_layer()
    alone = [both.alone(row) for row in range(2)]
    build = lambda layer, *rows: _built(
        layer, given_regions, options, chunk_growth(), regions, ReadPlan(rows, SINKS, RECENT)
    )
    index, single = build(both, *budgets), [build(alone[row], budgets[row]) for row in range(2)]
    for _ in range(9):
        for layer in (both, *alone):
            layer.append()
        reads = index.select(both.step())
        found = read_sets(both, reads)
        assert max(x.shape[-1] for x in (reads.slots, index._unit_steps)) <= both.length + 1
        for row in range(2):
            own = single[row].select(alone[row].step())
            assert [set(x) for x in found[row]] == [set(x) for x in read_sets(alone[row], own)[0]]
            keys, own_keys = (torch.as_tensor(x.key_rows).expand(n, 2) for x, n in ((reads, 2), (own, 1)))
            assert keys[row].tolist() == own_keys[0].tolist()
            # The keys of what is listed, of which there may be less than is wanted.
            limit = min(
                int(min((budgets[row] - SINKS - RECENT) * shortlist, 1000)), both.newest(row) + 1 - SINKS - RECENT
            )
            assert keys[row].tolist() == [limit] * 2
            if replacement:
                left, own_left = (x.rest.log_counts[r].exp().sum(-1) for x, r in ((reads, row), (own, 0)))
                assert torch.allclose(left, own_left)


def _built(layer, given_regions, options, growth, labels, plan, coarse=()):
    index = given_regions(layer.frame(SINKS), options, growth, labels, coarse)
    layer.permute(index.build(layer.view(), plan))
    return index


@pytest.mark.parametrize("select", ["kv_head", "query_head"])
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_read_to_choose_is_charged(make_layer, chunk_growth, read_plan, regions, select, per_head):
    """Per kv head: the centroids of each of its units, and the mean values that each of its selections reads."""
    layer, options = make_layer(), RegionOptions(select=select, replacement=4)

    class PerHead(RegionIndex):
        def partition(self, view, parts):
            at = view.positions.clamp(min=0)
            labels = torch.where(view.valid, regions.expand(2, 2, -1).gather(-1, at), -1)
            return labels.repeat_interleave(3, dim=1) if per_head else labels

    index = PerHead(layer.frame(SINKS), options, chunk_growth())
    layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
    layer.append()
    reads = index.select(layer.step())
    units, selections = index.store.vectors.shape[1] // 2, reads.rest.values.shape[1] // 2
    assert (units, selections) == (3 if per_head else 1, 3 if per_head or select == "query_head" else 1)
    assert reads.index_rows == index.store.num * units + 4 * selections
    dim = layer.view().keys.shape[-1]
    assert reads.index_bytes == reads.index_rows * dim * layer.view().keys.element_size()


@pytest.mark.parametrize("shortlist", [1.0, 1.5])
def test_what_stands_in_is_what_is_not_read(make_layer, given_regions, chunk_growth, read_plan, regions, shortlist):
    layer = make_layer(padding=(0, 0))
    options = RegionOptions(replacement=6, shortlist=shortlist)
    index = given_regions(layer.frame(SINKS), options, chunk_growth(), regions)
    layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
    for _ in range(9):
        layer.append()
        step = layer.step()
        reads = index.select(step)
    found = read_sets(layer, reads)
    labels = index.known_labels(layer.length)
    for row in range(2):
        for head in range(2):
            members = {}
            for slot in range(layer.length):
                label = int(labels[row, head, slot])
                position = int(layer.positions[row, head, slot])
                if label >= 0 and SINKS <= position <= layer.newest(row) - RECENT:
                    members.setdefault(label, []).append(position)
            left = {}
            for label, inside in members.items():
                unread = [p for p in inside if p not in found[row][head]]
                if unread:
                    left[label] = (len(unread), sum(layer.key(row, head, p) for p in inside) / len(inside), inside)
            scores = layer.query(row, head)
            for place in range(6):
                count = math.exp(float(reads.rest.log_counts[row, head, place]))
                if count == 0:
                    continue
                score = reads.rest.scores[row, head, :, place].double()
                match = [x for x in left.values() if torch.allclose(scores @ x[1], score, atol=1e-4)]
                assert len(match) == 1 and match[0][0] == round(count)
                values = layer.view().values[row, head].double()
                own = [int((layer.positions[row, head] == p).nonzero()[0]) for p in match[0][2]]
                assert torch.allclose(values[own].mean(0), reads.rest.values[row, head, place].double(), atol=1e-5)


def test_members_first_by_a_scorer(make_layer, given_regions, chunk_growth, read_plan):
    layer = make_layer(padding=(0, 0), group=1)
    one_region = torch.zeros(1, 1, 70, dtype=torch.int64)
    index = given_regions(layer.frame(SINKS), RegionOptions(truncation="score"), chunk_growth(), one_region)
    scores = torch.rand(2, 2, 70, generator=torch.Generator().manual_seed(1))
    layer.permute(index.build(layer.view(), read_plan(20, SINKS, RECENT), scores))
    layer.append()
    # One region holds everything but the token that just left the window.
    found = read_sets(layer, index.select(layer.step()))
    for row in range(2):
        for head in range(2):
            best = scores[row, head, SINKS : 70 - RECENT].topk(12).indices + SINKS
            assert len(set(found[row][head]) & set(best.tolist())) >= 11


def test_a_short_row_reads_all_it_has(make_layer, given_regions, chunk_growth, read_plan):
    """Sinks lie in the window or are not there yet; nothing is read twice, and nothing is missed."""
    layer = make_layer(length=40, padding=(0, 37))
    labels = torch.arange(80).view(1, 1, 80) // 5
    index = given_regions(layer.frame(SINKS), RegionOptions(), chunk_growth(), labels)
    layer.permute(index.build(layer.view(), read_plan(20, SINKS, RECENT)))
    for _ in range(30):
        layer.append()
        reads = index.select(layer.step())
        positions = (
            layer.positions[1, 0].gather(0, reads.slots[1, 0].clamp(min=0)).masked_fill(reads.slots[1, 0] < 0, -1)
        )
        real = sorted(p for p in positions.tolist() if p >= 0)
        assert len(real) == len(set(real)) == min(20, layer.newest(1) + 1)
        if layer.newest(1) < 20:
            assert real == list(range(layer.newest(1) + 1))


def test_batch_operations_carry_everything(make_layer, given_regions, chunk_growth, read_plan, regions):
    layer = make_layer()
    options = RegionOptions(replacement=4)
    index = given_regions(layer.frame(SINKS), options, chunk_growth(), regions)
    layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
    for _ in range(3):
        layer.append()
        index.select(layer.step())
    index.map_rows(lambda x: x[[1, 0, 1]])
    for name in ("all_keys", "all_values", "queries", "all_positions", "slots"):
        setattr(layer, name, getattr(layer, name)[[1, 0, 1]])
    layer.batch = 3
    layer.append()
    reads = index.select(layer.step())
    assert torch.equal(reads.slots[0], reads.slots[2]) and not torch.equal(reads.slots[0], reads.slots[1])
    assert torch.equal(reads.rest.values[0], reads.rest.values[2])


def test_a_step_needs_no_memory_that_grows(make_layer, given_regions, chunk_growth, read_plan):
    """The largest tensor made by a step does not depend on the number of slots, but for the scores of regions."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            views = (
                "view",
                "expand",
                "as_strided",
                "slice",
                "select",
                "transpose",
                "unsqueeze",
                "alias",
                "detach",
                "permute",
            )
            if not any(name in str(func) for name in (*views, "_.", "unfold", "squeeze", "t.default")):
                self.numel = max([self.numel, *(x.numel() for x in tensors if isinstance(x, torch.Tensor))])
            return out

    largest = []
    for length in (600, 2400):
        layer = make_layer(length=length, padding=(0, 0), dim=16)
        labels = (torch.arange(length + 40) * 12 // length).view(1, 1, -1)
        index = given_regions(layer.frame(SINKS), RegionOptions(truncation="exact"), chunk_growth(), labels)
        layer.permute(index.build(layer.view(), read_plan(26, SINKS, RECENT)))
        index._widest = 30
        layer.append()
        index.select(layer.step())
        layer.append()
        step = layer.step()
        with Largest() as seen:
            index.select(step)
        largest.append(seen.numel)
    assert largest[0] == largest[1]
