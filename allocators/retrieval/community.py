"""CommunityKV: communities of the attention graph as the regions that are read (arXiv 2610.00418)."""

import math
from dataclasses import dataclass, fields

from kvstitch.allocators.options import check_choices, check_counts, check_fractions, check_seed, check_switches
from kvstitch.allocators.retrieval.base import LayerFrame, LayerIndex, RetrievingAllocator
from kvstitch.allocators.retrieval.community_index import CommunityIndex
from kvstitch.allocators.retrieval.geometry import METRICS, QueryGeometry
from kvstitch.allocators.retrieval.graph import AGGREGATIONS, EdgeStore, check_neighbours
from kvstitch.allocators.retrieval.growth import GROWTHS, ChunkGrowth, Growth
from kvstitch.allocators.retrieval.joining import DeltaQGrowth, NearestGrowth
from kvstitch.allocators.retrieval.partition import PARTITIONS
from kvstitch.allocators.retrieval.partitioning import Partitioning
from kvstitch.allocators.retrieval.region_index import TRUNCATIONS, RegionOptions, check_shortlist
from kvstitch.allocators.retrieval.scoring import COMBINATIONS, SELECTIONS
from kvstitch.kernels.topk_attention.api import GROUP_MEANS


@dataclass(frozen=True, kw_only=True)
class CommunityRetrieval(RetrievingAllocator):
    """Reads the communities of the attention graph whose centroids the query likes best (CommunityKV, arXiv 2610.00418).

    During prefill each query leaves its `top_k` largest attention weights; direct and co-attention edges make a graph of
    the tokens, Leiden cuts it into communities, and the mean of its keys stands for each. A decode step reads
    communities from the best down until the budget is full. New tokens go where `growth` says.

    The defaults are `recommended()`, what measures best on the embedded model; `paper()` holds the paper's values.

    Args:
        top_k: kappa, edges per query.
        direct_weight: lambda, share of direct attention in the graph; the rest is co-attention.
        aggregation: one graph per kv head ("query_group": edges by the mean weight of its query heads), per query head
            ("per_head", whose index holds a list of slots as storage has one order only), or per layer.
        group_mean: how the heads of a group are averaged: "exact", or "merged", the top k of each head added up, which
            takes a GPU one pass over the keys instead of two (see `topk_attention`).
        edge_stride: tokens of the prompt whose number is no multiple of this leave no edges, and the others count so many
            times; 1: all do. Finding edges, the graph and Leiden cost that much less; tokens that nobody attends to may
            stay without edges.
        sinks_in_graph: whether sinks have edges; they are read at every step in any case.
        partition: what cuts the graph: "leiden", or for the ablation "connected_components", "top_k_neighbourhoods",
            "kmeans" (on keys), "chunks" or "random", the last four with as many regions as Leiden finds.
        resolution: gamma of Leiden's modularity, or "auto" to find the one at which a median token sees about
            `target_tokens` in its own community.
        target_tokens: see `resolution`.
        min_mean_tokens: at most one community per so many tokens; the smallest are pooled (see `capped`).
        run_tokens: length of the runs that tokens without edges, and pooled ones, are cut into.
        iterations: full Leiden cycles.
        refine_steps: Lloyd steps on the keys after Leiden.
        metric: distance of keys for those steps and for "kmeans": "euclidean", or as "queries" feel it (see
            `QueryGeometry`).
        seed: of Leiden and of the ablation's partitions.
        combine: how the query heads of a group rate a community together: "mean" or "max" of their scores, or
            "softmax_sum" of their shares.
        select: one selection per "kv_head", or per "query_head" (reads more: the union).
        truncation: members read of the community that does not fit: the "recent" ones, those first by a scorer
            ("score", which the press is then given), or those of the largest "exact" q.k.
        shortlist: communities are listed up to this many times the retrieved slots, and exact q.k picks among their
            members; 1 for none.
        replacement: how many of the best communities stand in, by their centroids, for their members that are not read
            (Multipole attention, which takes all); 0 for none.
        levels: 1, or more to find communities down a tree of Leiden's coarser ones: of n communities a step then reads
            O(D n / 16 ** (levels - 1)), or, with "auto", as many levels as leave about 16 at the top, O(D log n).
        growth: what becomes of new tokens: "chunk", a community every `growth_tokens`; "nearest", the one with the
            nearest centroid; "delta_q", the paper's greedy rule on modularity with frozen labels.
        growth_tokens: see `growth`.
        refresh: new tokens after which everything is partitioned again in the background; None for never.
    """

    top_k: int = 8  # paper
    direct_weight: float | int = 0.5  # paper
    aggregation: str = "query_group"  # paper
    group_mean: str = "exact"
    edge_stride: int = 4  # as good as all edges, and a quarter of the work
    sinks_in_graph: bool = False  # paper
    partition: str = "leiden"  # paper
    resolution: float | int | str = "auto"
    target_tokens: float | int = 12
    min_mean_tokens: int = 8  # an index of at most an eighth of the keys, as Quest's two vectors for every 16 tokens
    run_tokens: int = 16
    iterations: int = 1
    refine_steps: int = 3  # more change little
    metric: str = "queries"
    seed: int = 0
    combine: str = "softmax_sum"
    select: str = "kv_head"
    truncation: str = "recent"
    shortlist: float | int = 1
    replacement: int = 128
    levels: int | str = 1
    growth: str = "chunk"
    growth_tokens: int = 16
    refresh: int | None = None

    def __post_init__(self):
        check_counts(
            self,
            {"top_k": 1, "min_mean_tokens": 1, "run_tokens": 1, "iterations": 1, "refine_steps": 0, "replacement": 0},
        )
        check_counts(self, {"edge_stride": 1})
        check_counts(self, {"growth_tokens": 1} | ({} if self.refresh is None else {"refresh": 1}))
        check_seed(self)
        check_fractions(self, ("direct_weight",))
        check_switches(self, ("sinks_in_graph",))
        choices = {"aggregation": AGGREGATIONS, "partition": PARTITIONS, "combine": COMBINATIONS, "select": SELECTIONS}
        check_choices(self, choices | {"metric": METRICS, "group_mean": GROUP_MEANS})
        check_choices(self, {"truncation": TRUNCATIONS, "growth": GROWTHS})
        check_shortlist(self)
        if self.resolution != "auto":
            _check_positive("resolution", self.resolution, ", or 'auto'")
        _check_positive("target_tokens", self.target_tokens)
        self._check_growth()
        self._check_levels()
        if self.group_mean != "exact" and self.aggregation == "per_head":
            raise ValueError(
                f"group_mean={self.group_mean!r} averages the heads of a group, and aggregation='per_head' averages none: "
                "choose aggregation='query_group' or 'per_layer', or group_mean='exact'"
            )

    @classmethod
    def recommended(cls, **overrides: object) -> "CommunityRetrieval":
        """What measures best; the defaults."""
        return cls(**overrides)

    @classmethod
    def paper(cls, **overrides: object) -> "CommunityRetrieval":
        """The paper's values. Where it is silent: gamma 1, whole communities as Leiden finds them, the newest members."""
        stated = {
            "direct_weight": 0.5,
            "resolution": 1.0,
            "min_mean_tokens": 1,
            "run_tokens": 1,
            "edge_stride": 1,
            "refine_steps": 0,
            "metric": "euclidean",
            "replacement": 0,
            "combine": "mean",
            "truncation": "recent",
            "growth": "delta_q",
        }
        return cls(**(stated | overrides))

    def _check_growth(self) -> None:
        uses_weights = self.growth == "delta_q" or self.refresh is not None
        if uses_weights and self.select == "query_head" and self.aggregation != "per_head":
            raise ValueError(
                "growth='delta_q' and refresh need one selection for each graph: select='query_head' goes with "
                "aggregation='per_head' only"
            )
        if self.growth != "delta_q":
            return
        if self.replacement:
            raise ValueError("growth='delta_q' does not follow the mean values of communities, which replacement needs")
        if self.resolution == "auto":
            raise ValueError("growth='delta_q' goes on at the resolution of the graph, so it must be given, not 'auto'")
        if self._moves_keys:
            raise ValueError("growth='delta_q' goes on with the graph's communities, which k-means on keys changes")

    def _check_levels(self) -> None:
        if isinstance(self.levels, str) and self.levels != "auto":
            raise ValueError(f"levels must be an int, or 'auto', got {self.levels!r}")
        if self.levels != "auto":
            check_counts(self, {"levels": 1})
        if self.levels != 1 and self.growth != "chunk":
            raise ValueError(
                f"levels above 1 need growth='chunk', as the tree does not follow members, got {self.growth!r}"
            )

    @property
    def _moves_keys(self) -> bool:
        return self.refine_steps > 0 or self.partition == "kmeans"

    @property
    def needs_scores(self) -> bool:
        return self.truncation == "score"

    def check_prompt(self, num_tokens: int, num_sinks: int) -> None:
        check_neighbours(self.top_k, num_tokens, self._first_node(num_sinks))

    def _first_node(self, num_sinks: int) -> int:
        return 0 if self.sinks_in_graph else num_sinks

    def start(self, frame: LayerFrame) -> LayerIndex:
        first_node = self._first_node(frame.num_sinks)
        return CommunityIndex(
            frame,
            self.read_options,
            self.growth_rule(),
            EdgeStore(self.top_k, first_node, self.aggregation, self.group_mean, self.edge_stride),
            Partitioning(**{field.name: getattr(self, field.name) for field in fields(Partitioning)}),
            first_node,
            self.refine_steps,
            self.refresh,
            QueryGeometry() if self.metric == "queries" and self._moves_keys else None,
        )

    @property
    def read_options(self) -> RegionOptions:
        """How communities are read."""
        return RegionOptions(
            self.combine,
            self.select,
            self.truncation,
            self.shortlist,
            self.replacement,
            grows_higher=self.levels == "auto",
            new_tokens=self.growth_tokens,
        )

    def growth_rule(self) -> Growth:
        """What becomes of new tokens, for one layer."""
        if self.growth == "delta_q":
            return DeltaQGrowth(self.top_k, self.direct_weight, self.resolution)
        return ChunkGrowth(self.growth_tokens) if self.growth == "chunk" else NearestGrowth()


def _check_positive(name: str, value: object, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number{alternative}, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive{alternative}, got {value}")
