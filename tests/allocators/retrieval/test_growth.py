"""What becomes of new tokens, step by step, against dictionaries."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvstitch.allocators.retrieval.growth import ChunkGrowth
from kvstitch.allocators.retrieval.joining import DeltaQGrowth, NearestGrowth
from kvstitch.allocators.retrieval.region_index import RegionOptions

SINKS, RECENT, LENGTH = 2, 4, 50


@pytest.fixture
def start(make_layer, given_regions, read_plan):
    def make(growth, budget=20, truncation="recent", **options):
        layer = make_layer(length=LENGTH, padding=(0, 6), seed=5)
        labels = torch.randint(0, 6, (1, 1, LENGTH + 40), generator=torch.Generator().manual_seed(2))
        index = given_regions(layer.frame(SINKS), RegionOptions(truncation=truncation, **options), growth, labels)
        layer.permute(index.build(layer.view(), read_plan(budget, SINKS, RECENT)))
        return layer, index, labels[0, 0]

    return make


def members_now(layer, index, row, head):
    """Positions of each region, from its range and its label list."""
    found = {}
    store = index.store
    for region in range(store.num):
        start, size = int(store.starts[row, head, region]), int(store.sizes[row, head, region])
        found[region] = set(layer.positions[row, head, start : start + size].tolist()) if size else set()
    for slot in range(index.tail_start, index._buffer.boundary):
        if index.growth.joins_built:
            found[int(index.labels[row, head, slot])].add(int(layer.positions[row, head, slot]))
    return {region: members for region, members in found.items() if members}


def test_chunks_are_regions_with_mean_keys(start, chunk_growth):
    layer, index, _ = start(chunk_growth())
    for _ in range(11):
        layer.append()
        index.select(layer.step())
    for row in range(2):
        first = layer.newest(row) - RECENT - 10
        for head in range(2):
            members = members_now(layer, index, row, head)
            chunks = [members[region] for region in sorted(members)][-3:]
            assert chunks == [set(range(first + i, first + min(i + 4, 11))) for i in (0, 4, 8)]
            for region in sorted(members)[-3:]:
                mean = sum(layer.key(row, head, p) for p in members[region]) / len(members[region])
                assert torch.allclose(index.store.vectors[row, head, :, region].double(), mean, atol=1e-5)


@pytest.mark.parametrize("growth, dtype", [("chunk", torch.bfloat16), ("nearest", torch.float32)])
def test_means_of_a_cache_of_half_precision(make_layer, given_regions, read_plan, chunk_growth, growth, dtype):
    """They take half of the bytes where they are means of a few tokens, and are scored in float32 against any query."""
    layer = make_layer(length=LENGTH, padding=(0, 6), seed=5)
    layer.all_keys, layer.all_values = layer.all_keys.bfloat16(), layer.all_values.bfloat16()
    labels = torch.randint(0, 6, (1, 1, LENGTH + 40), generator=torch.Generator().manual_seed(2))
    rule = chunk_growth() if growth == "chunk" else NearestGrowth()
    index = given_regions(layer.frame(SINKS), RegionOptions(replacement=2), rule, labels)
    layer.permute(index.build(layer.view(), read_plan(20, SINKS, RECENT)))
    for _ in range(11):
        layer.append()
        index.select(layer.step())
    assert index.store.vectors.dtype == dtype
    rows = torch.randn(2, 2, 3, layer.all_keys.shape[-1], generator=torch.Generator().manual_seed(1))
    scores = index.store.score(rows)
    assert scores.dtype == torch.float32
    for row in range(2):
        for head in range(2):
            for region, members in members_now(layer, index, row, head).items():
                mean = sum(layer.key(row, head, p) for p in members) / len(members)
                assert torch.allclose(index.store.vectors[row, head, :, region].double(), mean, atol=2e-2)
                expected = rows[row, head].double() @ index.store.vectors[row, head, :, region].double()
                assert torch.allclose(scores[row, head, :, region].double(), expected, atol=1e-5)


def test_nearest_joins_the_nearest_centroid(start):
    layer, index, labels = start(NearestGrowth())
    expected = {}
    for row in range(2):
        for head in range(2):
            groups = {}
            for position in range(SINKS, layer.newest(row) - RECENT + 1):
                groups.setdefault(int(labels[position]), []).append(position)
            expected[row, head] = groups
    for _ in range(25):
        layer.append()
        index.select(layer.step())
        for (row, head), groups in expected.items():
            left = layer.newest(row) - RECENT
            key = layer.key(row, head, left)
            mean = lambda members: sum(layer.key(row, head, p) for p in members) / len(members)
            groups[min(groups, key=lambda region: float((key - mean(groups[region])).square().sum()))].append(left)
    for (row, head), groups in expected.items():
        members = members_now(layer, index, row, head)
        assert sorted(map(sorted, members.values())) == sorted(map(sorted, groups.values()))
        for region, inside in members.items():
            mean = sum(layer.key(row, head, p) for p in inside) / len(inside)
            assert torch.allclose(index.store.vectors[row, head, :, region].double(), mean, atol=1e-4)


@pytest.mark.parametrize("truncation", ["recent", "exact"])
@pytest.mark.parametrize("growth", ["nearest", "delta_q"])
def test_members_that_joined_are_read_with_their_region(start, growth, truncation):
    """Regions are taken whole, best first; of the last the newest members that fit."""
    layer, index, _ = start(
        NearestGrowth() if growth == "nearest" else DeltaQGrowth(3, 0.5, 1.0), truncation=truncation
    )
    for _ in range(25):
        layer.append()
        step = layer.step()
        reads = index.select(step)
        for row in range(2):
            for head in range(2):
                members = members_now(layer, index, row, head)
                positions = layer.positions[row, head].gather(0, reads.slots[row, head]).tolist()
                assert len(positions) == len(set(positions)) == 20
                retrieved = set(positions[SINKS + RECENT :])
                mean_query = layer.query(row, head).mean(0)
                score = lambda region: float(mean_query @ index.store.vectors[row, head, :, region].double())
                room = 20 - SINKS - RECENT
                for region in sorted(members, key=score, reverse=True):
                    inside = members[region]
                    taken = inside & retrieved
                    assert len(taken) == min(room, len(inside))
                    room -= len(taken)
                    if truncation == "recent" and 0 < len(taken) < len(inside):
                        tail = {int(layer.positions[row, head, s]) for s in range(index.tail_start, layer.length)}
                        assert taken == set(sorted(inside)[-len(taken) :]) or taken <= tail
        if index.update_top_k:
            slots = reads.slots[..., SINKS:]
            picked = torch.stack([slots[..., 3], slots[..., -1], slots[..., 5]], dim=-1).int()
            index.update(step, torch.rand(2, 2, 3, generator=layer.draw), picked)


def test_delta_q_joins_the_community_of_its_neighbours(start):
    layer, index, _ = start(DeltaQGrowth(2, 1.0, 1e-3))
    layer.append()
    step = layer.step()
    index.select(step)
    neighbours = torch.full((2, 2, 2), SINKS + 12, dtype=torch.int32)
    neighbours[1] = SINKS + 20
    wanted = index.labels.gather(-1, neighbours[..., :1].long())[..., 0].clone()
    index.update(step, torch.tensor([0.5, 0.25]).expand(2, 2, 2), neighbours)
    assert torch.equal(index.labels[..., layer.length - 1], wanted)
    # With no neighbour at all it founds a community, which is read once the token has left the window.
    layer.append()
    step = layer.step()
    index.select(step)
    index.update(step, torch.zeros(2, 2, 2), torch.full((2, 2, 2), -1, dtype=torch.int32))
    assert (index.labels[..., layer.length - 1] == index.labels[..., : layer.length - 2].amax(-1) + 1).all()


def test_putting_in_order_keeps_communities_and_reads(start, read_plan):
    """After the storage is put in order again the same regions exist, with the same members and degrees."""
    layer, index, _ = start(NearestGrowth())
    for _ in range(20):
        layer.append()
        index.select(layer.step())
    before = [[members_now(layer, index, row, head) for head in range(2)] for row in range(2)]
    table = torch.full((2, 2, LENGTH + 40), -1, dtype=torch.int64)
    for row in range(2):
        for head in range(2):
            for region, members in before[row][head].items():
                table[row, head, list(members)] = region
    index._by_position = table
    layer.permute(index.build(layer.view(), read_plan(20, SINKS, RECENT)))
    for row in range(2):
        for head in range(2):
            after = members_now(layer, index, row, head)
            assert sorted(map(sorted, after.values())) == sorted(map(sorted, before[row][head].values()))
    assert index._members._count == 0


class Made(TorchDispatchMode):
    """Numbers in all tensors that are no views of what an operator was given."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.numel += x.numel()
        return out


@pytest.mark.parametrize(
    "make_growth", [lambda: ChunkGrowth(4), NearestGrowth, lambda: DeltaQGrowth(3, 0.5, 1.0)], ids=["chunk", "nearest", "delta_q"]
)  # fmt: skip
def test_growth_costs_the_same_at_any_length(make_layer, given_regions, read_plan, make_growth):
    """O(d): as many numbers are made for a new token at 100 tokens as at 3,000."""
    made = []
    for length in (100, 3000):
        layer = make_layer(length=length, padding=(0, 0))
        labels = (torch.arange(length + 40) % 6).view(1, 1, -1)
        index = given_regions(layer.frame(SINKS), RegionOptions(), make_growth(), labels)
        layer.permute(index.build(layer.view(), read_plan(20, SINKS, RECENT)))
        for _ in range(2):
            layer.append()
            step = layer.step()
            index.select(step)
            edges = torch.full((2, 2, 3), SINKS + 12, dtype=torch.int32)
            with Made() as seen:
                index.growth.leave(index, layer.length - RECENT, step, None)
                index.update(step, torch.rand(2, 2, 3), edges)
        made.append(seen.numel)
    assert made[0] == made[1] > 0
