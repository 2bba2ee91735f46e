"""From the edges of one graph to the region of each token."""

from dataclasses import dataclass

import numpy as np

from kvstitch.allocators.retrieval.graph import attention_graph
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


@dataclass(frozen=True)
class Partitioned:
    """One graph cut into regions; arrays are indexed by position, n of them.

    Args:
        labels: `[n]` int64, -1 for tokens that are no nodes.
        degrees: `[n]` float64 weighted degrees.
        resolution: gamma of Leiden.
        modularity: of Leiden's communities at that gamma.
        num_leiden: communities that Leiden found, before small ones were pooled.
    """

    labels: np.ndarray
    degrees: np.ndarray
    resolution: float
    modularity: float
    num_leiden: int

    @property
    def num_regions(self) -> int:
        return int(self.labels.max(initial=-1)) + 1


@dataclass(frozen=True)
class Partitioning:
    """How a graph is made of edges and cut; fields as in `CommunityRetrieval`."""

    direct_weight: float
    partition: str
    resolution: float | str
    target_tokens: float
    min_mean_tokens: int
    run_tokens: int
    iterations: int
    seed: int

    def __call__(self, query: np.ndarray, key: np.ndarray, weight: np.ndarray, nodes: np.ndarray) -> Partitioned:
        """Regions of the marked tokens.

        Args:
            query, key, weight: edges between positions.
            nodes: `[n]` bool, tokens that take part; edges that touch others are left out.
        """
        inside = nodes[query] & nodes[key]
        number = np.cumsum(nodes) - 1
        count = int(nodes.sum())
        if count == 0:
            return Partitioned(np.full(len(nodes), -1, np.int64), np.zeros(len(nodes)), float("nan"), float("nan"), 0)
        graph = attention_graph(number[query[inside]], number[key[inside]], weight[inside], count, self.direct_weight)
        degrees = np.asarray(graph.sum(axis=1)).ravel()
        found = self._leiden(graph)
        communities = capped(found.labels, degrees, count // self.min_mean_tokens, self.run_tokens)
        labels, all_degrees = np.full(len(nodes), -1, np.int64), np.zeros(len(nodes))
        labels[nodes] = self._replaced(graph, communities, count)
        all_degrees[nodes] = degrees
        return Partitioned(labels, all_degrees, found.resolution, found.modularity, int(found.labels.max(initial=-1)) + 1)

    def _leiden(self, graph) -> Communities:
        if self.resolution == "auto":
            return leiden_of_size(graph, self.target_tokens, self.seed, self.iterations)
        return leiden(graph, self.resolution, self.seed, self.iterations)

    def _replaced(self, graph, communities: np.ndarray, count: int) -> np.ndarray:
        """Leiden's communities, or what the ablation puts in their place; "kmeans" needs keys and is done elsewhere."""
        num = int(communities.max(initial=-1)) + 1
        if self.partition == "connected_components":
            return components(graph)
        if self.partition == "top_k_neighbourhoods":
            return neighbourhoods(graph, num)
        if self.partition == "chunks":
            return chunks(count, num)
        if self.partition == "random":
            return shuffled(communities, self.seed)
        return communities
