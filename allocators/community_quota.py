"""Communities of the attention graph as the regions of an evicting allocator: AMS quotas, regions that need not be contiguous."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.evidence import Evidence
from kvstitch.allocators.limits import Limits
from kvstitch.allocators.options import check_choices, check_counts, check_seed
from kvstitch.allocators.retrieval.graph import attention_graph
from kvstitch.allocators.retrieval.partition import Communities, capped, leiden_of_size
from kvstitch.allocators.selector import Partition, protected, select, slots_of
from kvstitch.kernels.segment_quota.quotas import water_fill
from kvstitch.kernels.segment_quota.reference import protected_limits
from kvstitch.views import LayerView, Needs, QueryWindow

# Rows of attention that are held at once.
_WEIGHT_DECIMALS = 5
_BLOCK_QUERIES = 32


@dataclass(frozen=True, kw_only=True)
class CommunityQuota(EvictingAllocator):
    """A quota for each community of the attention graph (CommunityKV, arXiv 2610.00418) by window mass, as AMS gives
    them to segments (arXiv 2605.23200).

    The graph of an event is the co-attention of the recent queries: two slots are linked if the same query has both
    among its `top_k`. Leiden cuts it. A slot that no recent query links keeps the community that it had; one that never
    had any stands with up to `run_tokens` of its like, in the order of positions.

    Args:
        window_tokens: recent queries that make the graph and measure the mass.
        top_k: keys that each query links.
        target_tokens: size of community that a median linked slot sees.
        min_mean_tokens: at most one community per so many slots; the smallest are pooled.
        run_tokens: see above; also what pooled slots are cut into.
        min_keep_tokens: slots that each community keeps if the budget can pay for all of them.
        seed: of Leiden.
        num_sinks: first valid slots that are always kept, and have no edges.
        num_recent: last valid slots that are always kept.
        must_priority: who goes without if the budget cannot hold both: "sink" shortens the recent window, "suffix" the
            sinks.
    """

    window_tokens: int = 128
    top_k: int = 8  # CommunityKV
    target_tokens: int = 12
    min_mean_tokens: int = 4
    run_tokens: int = 16
    min_keep_tokens: int = 1  # as SegmentQuota
    seed: int = 0
    num_sinks: int = 4  # as SegmentQuota
    num_recent: int = 32  # as SegmentQuota
    must_priority: str = "sink"

    def __post_init__(self):
        positive = ("window_tokens", "top_k", "target_tokens", "min_mean_tokens", "run_tokens")
        check_counts(self, dict.fromkeys(positive, 1))
        check_counts(self, dict.fromkeys(("min_keep_tokens", "num_sinks", "num_recent"), 0))
        check_seed(self)
        check_choices(self, {"must_priority": ("sink", "suffix")})

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window_tokens)

    def allocate(
        self,
        view: LayerView,
        scores: Float32[Tensor, "B H T"],
        keep: Int64[Tensor, "B"],
        state: dict[str, Tensor],
    ) -> Selection:
        batch, heads, slots = scores.shape
        limits = Limits.of(keep, batch, scores.device)
        ids, graphs = self._cut_all(view, state.get("community"))
        regions = int(ids.max()) + 1
        partition = Partition.of_ids(ids, regions)
        count = view.valid.sum(dim=-1, keepdim=True)
        quota = limits.rows[:, None, None].minimum(count)
        must = protected(
            *protected_limits(quota, count, self.num_sinks, self.num_recent, self.must_priority), view.valid, slots
        )
        usage = self._evidence.of_layers([view], view.valid, limits.rows)
        lengths, masses, protected_in = (_per_region(x, ids, regions) for x in (view.valid, usage, must))
        quotas = water_fill(lengths, masses, protected_in, quota.double(), self.min_keep_tokens).long()
        chosen = select(scores, quotas, partition, must, view.valid)
        kept = slots_of(chosen, min(limits.most, slots))
        # Numbers mean something inside a head only, and 0 is nothing: what has no state yet comes as too short.
        # A row that loses nothing keeps what it has, so that a neighbour's event does not cut it anew.
        carried = torch.where(quota < count, ids, _lengthened(state.get("community"), ids))
        carried = carried.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -1)
        details = {
            "quotas": quotas,
            "lengths": lengths.long(),
            "modularity": graphs[..., 0],
            "resolution": graphs[..., 1],
        }
        return Selection(kept, state={"community": carried}, details=details)

    def communities(self, view: LayerView, carried: Int64[Tensor, "B H C"] | None = None) -> Int64[Tensor, "B H T"]:
        """The community of each slot, from 0 in each head; empty slots are in community 0.

        Args:
            carried: communities of the first C slots at the last event.
        """
        return self._cut_all(view, carried)[0]

    def _cut_all(
        self, view: LayerView, carried: Int64[Tensor, "B H C"] | None
    ) -> tuple[Int64[Tensor, "B H T"], Float32[Tensor, "B H 2"]]:
        """The community of each slot; modularity and resolution of Leiden's partition of each graph."""
        weights, columns = self._edges(view)
        old = _lengthened(carried, view.positions)
        ids = torch.zeros_like(view.positions)
        graphs = torch.zeros(*ids.shape[:2], 2, device=ids.device)
        for row in range(ids.shape[0]):
            for head in range(ids.shape[1]):
                valid = view.valid[row, head].cpu().numpy()
                edges = (weights[row, head].cpu().numpy(), columns[row, head].cpu().numpy())
                cut, found = self._cut(*edges, valid, old[row, head].cpu().numpy())
                ids[row, head] = torch.from_numpy(cut).to(ids.device)
                graphs[row, head] = torch.tensor([found.modularity, found.resolution])
        return ids, graphs

    @property
    def _evidence(self) -> Evidence:
        return Evidence(
            window_tokens=self.window_tokens,
            pool_kernel=1,
            pool_edges="valid",
            mass_pad="visible_mean",
            sink_mass="exclude",
            query_positions="own",
            num_sinks=self.num_sinks,
        )

    def _edges(self, view: LayerView) -> tuple[Float32[Tensor, "B H W k"], Int64[Tensor, "B H W k"]]:
        """The `top_k` largest weights of each recent query, mean over its group, and their slots; weight 0: no edge."""
        if view.queries is None:
            raise ValueError(
                f"the view holds no queries; this allocator needs the last {self.window_tokens} (see `needs`)"
            )
        window = view.queries.last(self.window_tokens)
        sinks = view.valid & (view.valid.cumsum(dim=-1) <= self.num_sinks)
        top_k = min(self.top_k, view.positions.shape[-1])
        blocks = []
        for start in range(0, window.positions.shape[-1], _BLOCK_QUERIES):
            part = slice(start, start + _BLOCK_QUERIES)
            block = QueryWindow(window.rotated[:, :, part], window.positions[:, part])
            weights = _attention(block, view).masked_fill(sinks[:, :, None], 0)
            blocks.append(weights.topk(top_k, dim=-1))
        return torch.cat([block.values for block in blocks], 2), torch.cat([block.indices for block in blocks], 2)

    def _cut(
        self, weights: np.ndarray, columns: np.ndarray, valid: np.ndarray, old: np.ndarray
    ) -> tuple[np.ndarray, Communities]:
        """Communities of one head, from 0, empty slots in community 0; and what Leiden found."""
        ids = np.zeros(len(valid), np.int64)
        # Nodes are numbered over the valid slots: Leiden visits them by number, so padding would change what it finds.
        place = np.cumsum(valid) - 1
        ids[valid], found = self._cut_packed(weights, place[columns], int(valid.sum()), old[valid])
        return ids, found

    def _cut_packed(
        self, weights: np.ndarray, columns: np.ndarray, length: int, old: np.ndarray
    ) -> tuple[np.ndarray, Communities]:
        query = np.broadcast_to(np.arange(weights.shape[0])[:, None], weights.shape)
        # Rounded, so that the last bits of a product do not decide between partitions.
        weights = weights.astype(np.float64).round(_WEIGHT_DECIMALS)
        real = weights > 0
        # Queries are nodes behind the slots, so that only what they attend to together is linked.
        nodes = length + weights.shape[0]
        graph = attention_graph(length + query[real], columns[real], weights[real], nodes, 0.0)
        graph = graph[:length, :length].tocsr()
        graph.sort_indices()
        degrees = np.asarray(graph.sum(axis=1)).ravel()
        found = leiden_of_size(graph, self.target_tokens, self.seed)
        labels = np.where(degrees > 0, found.labels, -1)
        keeps_old = (degrees == 0) & (old >= 0)
        labels[keeps_old] = labels.max(initial=-1) + 1 + old[keeps_old]
        alone = labels < 0
        labels[alone] = labels.max(initial=-1) + 1 + np.arange(int(alone.sum())) // self.run_tokens
        inside = np.unique(labels, return_inverse=True)[1]
        # A degree of at least a little, so that only size and degree decide who is pooled.
        return capped(inside, degrees + 1e-12, max(1, length // self.min_mean_tokens), self.run_tokens), found


def _attention(window: QueryWindow, view: LayerView) -> Float32[Tensor, "B H W T"]:
    """Attention of recent queries to all slots, mean over the heads of a group; 0 on slots after the query."""
    batch, heads, slots, dim = view.keys.shape
    rows = window.rotated.float().reshape(batch, heads, -1, dim)
    count = window.positions.shape[-1]
    keys = view.keys.float().masked_fill(~view.valid[..., None], 0)
    logits = (rows @ keys.transpose(-1, -2) * view.scaling).view(batch, heads, -1, count, slots)
    hidden = (view.positions[:, :, None] > window.positions[:, None, :, None]) | ~view.valid[:, :, None]
    weights = logits.masked_fill(hidden[:, :, None], -torch.inf).softmax(dim=-1).mean(dim=2)
    return weights.masked_fill(hidden | ~window.valid[:, None, :, None], 0)


def _lengthened(carried: Int64[Tensor, "B H C"] | None, like: Int64[Tensor, "B H T"]) -> Int64[Tensor, "B H T"]:
    """What the first C slots carry, and -1 for those that came later."""
    out = torch.full_like(like, -1)
    if carried is not None:
        out[..., : carried.shape[-1]] = carried
    return out


def _per_region(x: Bool[Tensor, "B H T"] | Float32[Tensor, "B H T"], ids: Tensor, regions: int) -> Tensor:
    """`[B, H, R]` float64 sums of a value per slot."""
    sums = torch.zeros(*ids.shape[:2], regions, dtype=torch.float64, device=ids.device)
    return sums.scatter_add_(-1, ids, x.double())
