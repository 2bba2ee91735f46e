"""From the edges of one graph to the region of each token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from kvstitch.allocators.retrieval.graph import EdgeArrays, attention_graph
from kvstitch.allocators.retrieval.parents import BRANCHING
from kvstitch.allocators.retrieval.partition import (
    Communities,
    capped,
    chunks,
    components,
    leiden,
    leiden_of_size,
    neighbourhoods,
    shuffled,
)

# Levels above the regions if there are to be as many as are needed: each has an eighth of the nodes below at most, so that
# millions of regions have one root.
_MOST_LEVELS = 6


@dataclass(frozen=True)
class Partitioned:
    """One graph cut into regions; arrays are indexed by position, n of them.

    Args:
        labels: `[n]` int64, -1 for tokens that are no nodes.
        degrees: `[n]` float64 weighted degrees.
        resolution: gamma of Leiden.
        modularity: of Leiden's communities at that gamma.
        num_leiden: communities that Leiden found, before small ones were pooled.
        coarse: `[n]` each, communities of communities, nearest first; -1 for tokens that are no nodes.
    """

    labels: np.ndarray
    degrees: np.ndarray
    resolution: float | int
    modularity: float | int
    num_leiden: int
    coarse: tuple[np.ndarray, ...] = ()

    @property
    def num_regions(self) -> int:
        return int(self.labels.max(initial=-1)) + 1


@dataclass(frozen=True)
class Partitioning:
    """How a graph is made of edges and cut; fields as in `CommunityRetrieval`."""

    direct_weight: float | int
    partition: str
    resolution: float | int | str
    target_tokens: float | int
    min_mean_tokens: int
    run_tokens: int
    iterations: int
    seed: int
    levels: int | str

    def __call__(self, edges: EdgeArrays, nodes: np.ndarray) -> Partitioned:
        """Regions of the marked tokens.

        Args:
            edges: between positions.
            nodes: `[n]` bool, tokens that take part; edges that touch others are left out.
        """
        inside = nodes[edges.query] & nodes[edges.key]
        number = np.cumsum(nodes) - 1
        count = int(nodes.sum())
        if count == 0:
            nowhere = np.full(len(nodes), -1, np.int64)
            return Partitioned(
                nowhere, np.zeros(len(nodes)), float("nan"), float("nan"), 0, (nowhere,) * self._num_coarse
            )
        query, key, weight, repeats = (column[inside] for column in edges[:4])
        graph = attention_graph(number[query], number[key], weight, count, self.direct_weight, repeats)
        degrees = np.asarray(graph.sum(axis=1)).ravel()
        found = self._leiden(graph)
        labels, all_degrees = np.full(len(nodes), -1, np.int64), np.zeros(len(nodes))
        labels[nodes] = self._replaced(graph, self._capped(found.labels, degrees), degrees)
        all_degrees[nodes] = degrees
        num_leiden = int(found.labels.max(initial=-1)) + 1
        coarse = tuple(self._coarser(graph, labels[nodes], nodes))
        return Partitioned(labels, all_degrees, found.resolution, found.modularity, num_leiden, coarse)

    @property
    def _num_coarse(self) -> int:
        return _MOST_LEVELS if self.levels == "auto" else self.levels - 1

    def _coarser(self, graph: csr_matrix, labels: np.ndarray, nodes: np.ndarray) -> Iterator[np.ndarray]:
        """Leiden's levels above the regions: each cuts the graph of the regions below, about `BRANCHING` to a parent.

        With `levels="auto"` all graphs have as many, so that those of a batch go together; above `BRANCHING` regions or
        fewer stands one root.
        """
        for _ in range(self._num_coarse):
            num = int(labels.max(initial=-1)) + 1
            if self.levels == "auto" and num <= BRANCHING:
                labels = np.zeros_like(labels)
                yield self._at_nodes(labels, nodes)
                continue
            member = csr_matrix((np.ones(len(labels)), (np.arange(len(labels)), labels)), shape=(len(labels), num))
            between = (member.T @ graph @ member).tocsr()
            between.setdiag(0)
            between.eliminate_zeros()
            between.sort_indices()
            found = leiden_of_size(between, BRANCHING, self.seed, self.iterations)
            degrees = np.asarray(between.sum(axis=1)).ravel()
            labels = capped(found.labels, degrees, max(1, num // (BRANCHING // 2)), BRANCHING)[labels]
            yield self._at_nodes(labels, nodes)

    @staticmethod
    def _at_nodes(labels: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        out = np.full(len(nodes), -1, np.int64)
        out[nodes] = labels
        return out

    def _leiden(self, graph) -> Communities:
        if self.resolution == "auto":
            return leiden_of_size(graph, self.target_tokens, self.seed, self.iterations)
        return leiden(graph, self.resolution, self.seed, self.iterations)

    def _capped(self, labels: np.ndarray, degrees: np.ndarray) -> np.ndarray:
        return capped(labels, degrees, len(labels) // self.min_mean_tokens, self.run_tokens)

    def _replaced(self, graph: csr_matrix, communities: np.ndarray, degrees: np.ndarray) -> np.ndarray:
        """Leiden's communities, or what the ablation puts in their place; "kmeans" needs keys and is done elsewhere."""
        num, count = int(communities.max(initial=-1)) + 1, len(communities)
        if self.partition == "connected_components":
            return self._capped(components(graph), degrees)
        if self.partition == "top_k_neighbourhoods":
            return neighbourhoods(graph, num)
        if self.partition == "chunks":
            return chunks(count, num)
        if self.partition == "random":
            return shuffled(communities, self.seed)
        return communities
