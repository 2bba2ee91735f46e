"""Clusters of keys: the regions of Multipole attention, with or without its centroid replacement."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from kvstitch.allocators.options import check_choices, check_counts, check_seed
from kvstitch.allocators.retrieval.base import LayerFrame, LayerIndex, RetrievingAllocator
from kvstitch.allocators.retrieval.geometry import METRICS, QueryGeometry
from kvstitch.allocators.retrieval.growth import GROWTHS, ChunkGrowth, Growth
from kvstitch.allocators.retrieval.joining import NearestGrowth
from kvstitch.allocators.retrieval.kmeans import kmeans
from kvstitch.allocators.retrieval.reading import Parts
from kvstitch.allocators.retrieval.region_index import TRUNCATIONS, RegionIndex, RegionOptions, check_shortlist
from kvstitch.allocators.retrieval.scoring import COMBINATIONS, SELECTIONS
from kvstitch.views import LayerView


class ClusterIndex(RegionIndex):
    """Regions are clusters of keys. What comes after the first build is clustered by itself."""

    def __init__(
        self, frame: LayerFrame, options: RegionOptions, growth: Growth, tokens: int, steps: int, seed: int, metric: str
    ):
        super().__init__(frame, options, growth)
        self._tokens, self._steps, self._seed = tokens, steps, seed
        self._geometry = QueryGeometry() if metric == "queries" else None

    def observe(self, query, keys, positions, has_empty):
        if self._geometry is not None:
            self._geometry.observe(query, positions)

    def partition(self, view: LayerView, parts: Parts) -> Int64[Tensor, "B H T"]:
        labels = self.known_labels(view.positions.shape[-1])
        if labels is None:
            labels = torch.full_like(view.positions, -1)
        new = parts.body & (labels < 0)
        for row in range(labels.shape[0]):
            for head in range(labels.shape[1]):
                members = new[row, head].nonzero()[:, 0]
                # In the order of positions, which does not depend on how the storage lies.
                members = members[view.positions[row, head, members].argsort()]
                count = -(-len(members) // self._tokens)
                keys = view.keys[row, head, members]
                keys = keys if self._geometry is None else self._geometry.transform(keys, row, head)
                found = kmeans(keys, count, self._steps, self._seed)
                labels[row, head, members] = found + labels[row, head].max() + 1
        return labels

    def due(self, length: int) -> bool:
        return self.store is not None and self.growth.is_crowded(self, length)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(function)
        if self._geometry is not None:
            self._geometry.map_rows(function)

    @property
    def stored_bytes(self) -> int:
        return super().stored_bytes + (0 if self._geometry is None else self._geometry.stored_bytes)


@dataclass(frozen=True, kw_only=True)
class ClusterRetrieval(RetrievingAllocator):
    """Reads the clusters of keys whose centroids the query likes best (after Multipole attention, arXiv 2506.13059).

    Keys are clustered as they are stored, after RoPE; Multipole takes them before, at one fixed position, and mixes the
    approximate logits with exact ones. Its counts follow from the final labels here.

    Args:
        tokens_per_cluster: mean size; clusters are the tokens over this, rounded up.
        steps: Lloyd iterations.
        seed: of the draw of the first centroids.
        metric: distance of keys: "euclidean" (Multipole), or as "queries" feel it (see `QueryGeometry`).
        replacement: how many of the best clusters stand in, by their centroids, for their members that are not read
            (Multipole takes all); 0 for none.
        combine, select, truncation, shortlist, growth, growth_tokens: see `CommunityRetrieval`.
    """

    tokens_per_cluster: int = 16  # Multipole: 6.25 % clusters
    steps: int = 10  # Multipole
    seed: int = 0
    metric: str = "euclidean"  # Multipole
    replacement: int = 0
    combine: str = "softmax_sum"  # Multipole, but for the sizes in its softmax
    select: str = "kv_head"  # Multipole
    truncation: str = "recent"
    shortlist: float | int = 1.0
    growth: str = "chunk"
    growth_tokens: int = 16

    def __post_init__(self):
        check_counts(self, {"tokens_per_cluster": 1, "steps": 0, "growth_tokens": 1, "replacement": 0})
        check_seed(self)
        check_choices(
            self,
            {
                "metric": METRICS,
                "combine": COMBINATIONS,
                "select": SELECTIONS,
                "truncation": TRUNCATIONS,
                "growth": GROWTHS[:2],
            },
        )
        check_shortlist(self)

    @property
    def needs_scores(self) -> bool:
        return self.truncation == "score"

    def start(self, frame: LayerFrame) -> LayerIndex:
        options = RegionOptions(self.combine, self.select, self.truncation, self.shortlist, self.replacement)
        growth = ChunkGrowth(self.growth_tokens) if self.growth == "chunk" else NearestGrowth()
        return ClusterIndex(frame, options, growth, self.tokens_per_cluster, self.steps, self.seed, self.metric)
