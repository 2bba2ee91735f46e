"""Layers to index, and a retrieval written with loops over Python numbers."""

import copy
import math

import pytest
import torch

from kvstitch.allocators.retrieval import DecodeStep, LayerFrame, ReadPlan
from kvstitch.allocators.retrieval.background import Background
from kvstitch.allocators.retrieval.growth import ChunkGrowth
from kvstitch.allocators.retrieval.region_index import RegionIndex
from kvstitch.views import LayerView


class GivenRegions(RegionIndex):
    """An index whose regions a test gives by position."""

    carried_over, fresh_degrees = False, None

    def __init__(self, frame, options, growth, labels, coarse=()):
        super().__init__(frame, options, growth)
        self._by_position, self._coarse_by_position = labels, coarse

    def partition(self, view, parts):
        at = view.positions.clamp(min=0)
        pick = lambda table: torch.where(view.valid, table.expand(*at.shape[:2], -1).gather(-1, at), -1)
        self.coarse = [pick(table) for table in self._coarse_by_position]
        return pick(self._by_position)


class Layer:
    """Random keys, values and queries of one layer that grows a token at a time, storage permuted as an index asks."""

    def __init__(self, batch=2, heads=2, group=3, length=70, dim=8, padding=(0, 9), seed=0, most=40):
        self.draw = torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.group, self.dim = batch, heads, group, dim
        total = length + most
        make = lambda *shape: torch.randn(*shape, generator=self.draw, dtype=torch.float64).float()
        self.all_keys, self.all_values = make(batch, heads, total, dim), make(batch, heads, total, dim)
        self.queries = make(batch, heads * group, total, dim) * 2
        pads = torch.tensor(padding)[:batch, None]
        self.all_positions = (torch.arange(total) - pads).clamp(min=-1)
        self.slots = torch.arange(length).expand(batch, heads, length).clone()
        self.scaling = dim**-0.5

    @property
    def length(self):
        return self.slots.shape[-1]

    def _take(self, x):
        return x.gather(2, self.slots[..., None].expand(-1, -1, -1, x.shape[-1]))

    @property
    def positions(self):
        return self.all_positions[:, None].expand(-1, self.heads, -1).gather(2, self.slots)

    def view(self):
        positions = self.positions
        return LayerView(
            keys=self._take(self.all_keys), values=self._take(self.all_values), positions=positions, valid=positions >= 0,
            scaling=self.scaling, next_position=positions.amax((1, 2)) + 1, layer_idx=0, num_layers=1,
        )  # fmt: skip

    def frame(self, num_sinks):
        return LayerFrame(0, self.group, num_sinks, self.scaling, Background(0))

    def permute(self, order):
        if order is not None:
            self.slots = self.slots.gather(2, order)

    def append(self):
        self.slots = torch.cat((self.slots, torch.full((self.batch, self.heads, 1), self.length)), dim=-1)

    def step(self):
        query = self.queries[:, :, self.length - 1 : self.length]
        return DecodeStep(query, self._take(self.all_keys), self._take(self.all_values), self.positions.int())

    def key(self, row, head, position):
        return self.all_keys[row, head, self._column(row, position)].double()

    def query(self, row, head):
        """`[G, D]` of the newest token."""
        heads = slice(head * self.group, (head + 1) * self.group)
        return self.queries[row, heads, self.length - 1].double()

    def alone(self, row):
        """The same row as a batch of its own, without its padding; before anything was put in order."""
        pad = int((self.all_positions[row] < 0).sum())
        other = copy.copy(self)
        for name in ("all_keys", "all_values", "queries"):
            setattr(other, name, getattr(self, name)[row : row + 1, :, pad:])
        other.all_positions = self.all_positions[row : row + 1, pad:]
        other.slots = torch.arange(self.length - pad).expand(1, self.heads, -1).clone()
        other.batch = 1
        return other

    def _column(self, row, position):
        return int((self.all_positions[row] == position).nonzero()[0])

    def newest(self, row):
        return int(self.all_positions[row, self.length - 1])


class PlainRegions:
    """What a region index should read, for one row and kv head; float64, loops, dicts."""

    def __init__(self, layer, row, head, regions, num_sinks, num_recent, growth_tokens=4):
        self.layer, self.row, self.head = layer, row, head
        self.num_sinks, self.num_recent, self.growth_tokens = num_sinks, num_recent, growth_tokens
        self.last = layer.newest(row) - num_recent
        self.first_new = self.last + 1
        self.regions = {}
        for position in range(num_sinks, self.last + 1):
            self.regions.setdefault(int(regions[position]), []).append(position)

    def advance(self):
        """The newest token pushed one out of the window."""
        self.last += 1
        if self.last >= self.num_sinks:
            start = max(self.first_new, 0)
            self.regions.setdefault(("new", (self.last - start) // self.growth_tokens), []).append(self.last)

    def centroid(self, members):
        return sum(self.layer.key(self.row, self.head, p) for p in members) / len(members)

    def score(self, members, combine, heads, all_members):
        queries = self.layer.query(self.row, self.head)[heads]
        if combine in ("mean", "max"):
            scores = (queries @ self.centroid(members)).tolist()
            return sum(scores) / len(scores) if combine == "mean" else max(scores)
        total = 0.0
        for query in queries:
            logits = [float(query @ self.centroid(m)) * self.layer.scaling for m in all_members]
            peak = max(logits)
            own = float(query @ self.centroid(members)) * self.layer.scaling
            total += math.exp(own - peak) / sum(math.exp(x - peak) for x in logits)
        return total

    def read(self, count, combine="mean", truncation="recent", heads=slice(None), shortlist=1.0):
        everything = list(self.regions.values())
        ranked = sorted(everything, key=lambda m: -self.score(m, combine, heads, everything))
        taken = []
        wanted = int(count * shortlist)
        for members in ranked:
            room = wanted - len(taken)
            if room <= 0:
                break
            taken += members if len(members) <= room else self._cut(members, room, truncation, heads)
        return self._best(taken, count, heads) if shortlist > 1 else taken

    def _cut(self, members, room, truncation, heads):
        if truncation == "recent":
            return sorted(members)[-room:]
        mean = self.layer.query(self.row, self.head)[heads].mean(0)
        return sorted(members, key=lambda p: -float(mean @ self.layer.key(self.row, self.head, p)))[:room]

    def _best(self, taken, count, heads):
        queries = self.layer.query(self.row, self.head)[heads]
        keys = torch.stack([self.layer.key(self.row, self.head, p) for p in taken])
        weights = (queries @ keys.T * self.layer.scaling).softmax(-1).mean(0)
        return [taken[i] for i in weights.argsort(descending=True)[:count]]


def nested(length, sizes, seed=0):
    """Labels of nested partitions, finest first."""
    draw = torch.Generator().manual_seed(seed)
    fine = torch.randint(0, sizes[0], (1, 1, length), generator=draw)
    levels = [fine]
    for size in sizes[1:]:
        parents = torch.randint(0, size, (int(levels[-1].max()) + 1,), generator=draw)
        levels.append(parents[levels[-1]])
    return levels


@pytest.fixture
def nested_labels():
    return nested


@pytest.fixture
def make_layer():
    return Layer


@pytest.fixture
def given_regions():
    return GivenRegions


@pytest.fixture
def plain_regions():
    return PlainRegions


@pytest.fixture
def chunk_growth():
    return lambda: ChunkGrowth(4)


@pytest.fixture
def read_plan():
    return lambda budget=26, num_sinks=3, num_recent=5, batch=2: ReadPlan((budget,) * batch, num_sinks, num_recent)
