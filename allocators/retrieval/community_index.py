"""The index of CommunityKV: edges while the prompt is read, communities when it is complete."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from kvstitch.allocators.retrieval.background import Job
from kvstitch.allocators.retrieval.base import DecodeStep, LayerFrame
from kvstitch.allocators.retrieval.geometry import QueryGeometry
from kvstitch.allocators.retrieval.graph import EdgeStore, GraphEdges, NewEdges
from kvstitch.allocators.retrieval.growth import Growth
from kvstitch.allocators.retrieval.kmeans import kmeans, refined
from kvstitch.allocators.retrieval.partitioning import Partitioned, Partitioning
from kvstitch.allocators.retrieval.reading import Parts
from kvstitch.allocators.retrieval.region_index import RegionIndex, RegionOptions, per_unit
from kvstitch.views import LayerView

# As in Multipole attention.
KMEANS_STEPS = 10


class CommunityIndex(RegionIndex):
    """Regions are communities of the attention graph.

    Everything before the first build is partitioned at once, in the background from the moment its edges exist. What a
    later turn adds is partitioned by itself, its edges into older text left out, unless `refresh` keeps all edges: then
    everything is partitioned anew.

    Args:
        frame: the layer.
        options: how regions are read.
        growth: what happens to new tokens.
        edges: where the edges of the prompt go.
        partitioning: how regions are made of them.
        first_node: position of the first token that is a node.
        refine_steps: Lloyd steps on keys after the partition.
        refresh: new tokens after which everything is partitioned again, or None.
        geometry: the distance of those steps; None: Euclidean.
    """

    def __init__(
        self,
        frame: LayerFrame,
        options: RegionOptions,
        growth: Growth,
        edges: EdgeStore,
        partitioning: Partitioning,
        first_node: int,
        refine_steps: int,
        refresh: int | None,
        geometry: QueryGeometry | None,
    ):
        super().__init__(frame, options, growth)
        self._edges = edges
        self._partitioning = partitioning
        self._first_node = first_node
        self._refine_steps = refine_steps
        self._refresh = refresh
        self._geometry = geometry
        self._jobs: list[Job] | None = None
        self._num_observed = 0
        self._new_edges: NewEdges | None = None
        self._built_length = 0
        self._described: dict[str, Tensor] = {}
        # Weighted degree of each slot's token in the graph it was just partitioned by, for growth rules that go on with it.
        self.fresh_degrees: Tensor | None = None
        # Whether the last build kept the regions that were there.
        self.carried_over = False
        if refresh is not None:
            self.update_top_k = max(self.update_top_k, edges.top_k)

    # -- while the prompt is read -----------------------------------------------------------------------------------

    def observe(self, query, keys, positions, has_empty):
        self._observe(query, keys, positions, has_empty, None)

    def attend(self, query, keys, values, positions):
        if self._edges.stride > 1 and not query.is_cuda:
            # A part of the queries is searched in less time than sharing the work would save.
            return None
        return self._observe(query, keys, positions, False, values)

    def _observe(self, query, keys, positions, has_empty, values):
        if self._new_edges is not None:
            # Of tokens decoded since the last build: the next one begins when this forward is over.
            self._new_edges.move_to(self._edges)
        model = (self.frame.scaling, self.frame.softcap, self.frame.sink_logits)
        output = self._edges.observe(query, keys, positions, has_empty, *model, values)
        if self._geometry is not None:
            self._geometry.observe(query, positions)
        self._num_observed += 1
        self._discard()
        if self._num_observed == 1:
            # Most prompts come in one piece. After a second one there is no telling which is the last, and work that
            # the next would make void is not begun.
            self.prepare()
        return output

    def prepare(self):
        if self._jobs is None and not self._edges.is_empty:
            graphs = [(row, graph) for row in range(self._edges.batch) for graph in range(self._edges.num_graphs)]
            self._jobs = [self.frame.background.submit(partial(self._cut, self._edges.of(*graph))) for graph in graphs]

    def _cut(self, edges: GraphEdges) -> Partitioned:
        """Runs in the background, where waiting for a device holds nobody up."""
        found = edges.arrays()
        nodes = np.zeros(int(max(found.seen.max(initial=-1), found.key.max(initial=-1))) + 1, dtype=bool)
        nodes[found.seen[found.seen >= self._first_node]] = True
        return self._partitioning(found, nodes)

    def _discard(self) -> None:
        for job in self._jobs or ():
            job.cancel()
        self._jobs = None

    # -- building ---------------------------------------------------------------------------------------------------

    def build(self, view, plan, scores=None):
        order = super().build(view, plan, scores)
        # Growth has taken what it goes on with.
        self.fresh_degrees = None
        return order

    def partition(self, view: LayerView, parts: Parts) -> Int64[Tensor, "B U T"]:
        if self._jobs is None and self._new_edges is not None:
            self._new_edges.move_to(self._edges)
        self.prepare()
        batch, heads, length = view.positions.shape
        units = heads * (self.frame.group if self._edges.aggregation == "per_head" else 1)
        labels = None if self._refresh is not None else self.known_labels(view.positions.shape[-1])
        self.carried_over = labels is not None
        if labels is None:
            labels = view.positions.new_full((batch, units, length), -1)
        positions, sinks = per_unit(view.positions, units), per_unit(parts.sinks, units)
        unknown = (labels < 0) & (positions >= 0) & ~sinks
        self.fresh_degrees = None
        if self._jobs is not None:
            results = self.frame.background.collect(self._jobs)
            found = self._at_slots([result.labels for result in results], -1, positions)
            self.fresh_degrees = self._at_slots([result.degrees for result in results], 0, positions).float()
            self._set_coarse(results, positions)
            numbers = ("modularity", "resolution", "num_leiden")
            self._described = {name: torch.tensor([getattr(result, name) for result in results]) for name in numbers}
            labels = torch.where(unknown & (found >= 0), found + labels.amax(dim=-1, keepdim=True) + 1, labels)
        labels = self._on_keys(labels, view, unknown)
        due = unknown if self.growth.keeps_labels else per_unit(parts.body, units)
        labels = _in_runs(labels, positions, due & (labels < 0), self._partitioning.run_tokens)
        self._after_partition(length)
        return labels

    def _after_partition(self, length: int) -> None:
        self._jobs = None
        self._num_observed = 0
        self._built_length = length
        if self._refresh is None:
            self._edges.clear()

    def _at_slots(self, arrays: list[np.ndarray], fill: int, positions: Int64[Tensor, "B U T"]) -> Tensor:
        """What the graphs of each row say of every slot's token; `fill` where they say nothing."""
        batch, units, _ = positions.shape
        width = max(max(map(len, arrays)), int(positions.max()) + 1)
        table = np.full((len(arrays), width), fill, arrays[0].dtype)
        for row, array in zip(table, arrays):
            row[: len(array)] = array
        table = torch.from_numpy(table).to(positions.device).view(batch, -1, width)
        return per_unit(table, units).gather(-1, positions.clamp(min=0))

    def _set_coarse(self, results: list[Partitioned], positions: Int64[Tensor, "B U T"]) -> None:
        """Coarser regions of all slots; earlier turns keep none, as theirs were of other graphs."""
        levels = zip(*(result.coarse for result in results))
        self.coarse = [self._at_slots(list(level), -1, positions) for level in levels]

    def _on_keys(self, labels: Tensor, view: LayerView, fresh: Tensor) -> Tensor:
        """What partitions by keys do to the regions just found: k-means in their place, or Lloyd steps on them."""
        replace = self._partitioning.partition == "kmeans"
        if self._jobs is None or not (replace or self._refine_steps):
            return labels
        labels = labels.clone()
        group = labels.shape[1] // view.keys.shape[1]
        for row in range(labels.shape[0]):
            for unit in range(labels.shape[1]):
                members = (fresh[row, unit] & (labels[row, unit] >= 0)).nonzero()[:, 0]
                if not len(members):
                    continue
                # The storage may be in the order of earlier regions.
                members = members[view.positions[row, unit // group, members].argsort()]
                old = labels[row, unit, members]
                keys, first = view.keys[row, unit // group, members], old.min()
                if self._geometry is not None:
                    keys = self._geometry.transform(keys, row, unit // group)
                if replace:
                    new = kmeans(keys, int(old.max() - first) + 1, KMEANS_STEPS, self._partitioning.seed)
                else:
                    new = refined(keys, old - first, self._refine_steps, self._partitioning.seed)
                labels[row, unit, members] = new + first
        return labels

    # -- while the model decodes --------------------------------------------------------------------------------------

    def update(self, step: DecodeStep, weights: Tensor, slots: Tensor) -> None:
        super().update(step, weights, slots)
        if self._refresh is None:
            return
        if self._new_edges is None:
            self._new_edges = NewEdges(self._refresh + self._lag, weights)
        self._new_edges.append(step, weights, slots)
        if step.length - self._built_length == self._refresh:
            self._new_edges.move_to(self._edges)
            self.prepare()

    @property
    def _lag(self) -> int:
        """New tokens between the snapshot and its use; they are all in the window then, so none lacks a region."""
        return self._buffer.num_recent

    def due(self, length: int) -> bool:
        if self.store is None:
            return False
        if self._refresh is not None:
            return length - self._built_length >= self._refresh + self._lag
        return self.growth.is_crowded(self, length)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(function)
        # Results are per row; work that is under way would be for rows of the past.
        self._discard()
        self._edges.map_rows(function)
        if self._geometry is not None:
            self._geometry.map_rows(function)
        if self._new_edges is not None:
            self._new_edges.map_rows(function)

    @property
    def stored_bytes(self) -> int:
        new = 0 if self._new_edges is None else self._new_edges.stored_bytes
        geometry = 0 if self._geometry is None else self._geometry.stored_bytes
        return super().stored_bytes + self._edges.stored_bytes + geometry + new

    def describe(self) -> dict[str, Tensor]:
        return super().describe() | self._described


def _in_runs(labels: Tensor, positions: Tensor, left: Tensor, run_tokens: int) -> Tensor:
    """New regions for the marked slots: runs of `run_tokens` in the order of positions."""
    batch, units, _ = labels.shape
    at = positions.clamp(min=0)
    present = positions.new_zeros(batch, units, int(positions.max()) + 1).scatter_add_(-1, at, left.long())
    rank = (present.cumsum(-1) - 1).gather(-1, at)
    first = labels.amax(dim=-1, keepdim=True) + 1
    return torch.where(left, first + rank // run_tokens, labels)
