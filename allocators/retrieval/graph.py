"""The attention graph of a prompt: what each query attends to most, and what is attended to together."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from scipy.sparse import csr_matrix
from torch import Tensor

from kvstitch.allocators.retrieval.base import DecodeStep
from kvstitch.kernels.topk_attention.api import TopKEdges, topk_attention, topk_edges

AGGREGATIONS = ("query_group", "per_head", "per_layer")


def check_neighbours(top_k: int, num_tokens: int, first_node: int) -> None:
    """Raise unless a query of a prompt can leave out some of the tokens that may be its neighbours.

    Args:
        top_k: edges per query.
        num_tokens: tokens of a row, padding excluded.
        first_node: first token that may be a neighbour: sinks are none.
    """
    most = max(0, num_tokens - first_node)
    if top_k >= most:
        raise ValueError(
            f"top_k must be less than the {most} tokens of the prompt that can be neighbours ({num_tokens} without "
            f"padding, of which {first_node} are sinks), got {top_k}"
        )


class EdgeStore:
    """The top-k edges of the queries seen so far, between positions, so that reordering the storage leaves them right.

    Args:
        top_k: edges per query.
        num_sinks: first tokens of each row that get no edges.
        aggregation: one graph per kv head ("query_group": edges by the mean weight over its query heads), per query
            head, or per layer (weights summed over kv heads, each of which lists its own top k).
        group_mean: how that mean is taken; as in `topk_attention`.
        stride: only tokens of the prompt whose number is a multiple leave edges; each stands for so many queries.
    """

    def __init__(self, top_k: int, num_sinks: int, aggregation: str, group_mean: str = "exact", stride: int = 1):
        self.top_k, self.aggregation, self.stride = top_k, aggregation, stride
        self._num_sinks, self._group_mean = num_sinks, group_mean
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._repeats: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self._queries

    @property
    def batch(self) -> int:
        return self._keys[0].shape[0]

    @property
    def num_graphs(self) -> int:
        """Graphs per row."""
        return 1 if self.aggregation == "per_layer" else self._keys[0].shape[1]

    def observe(
        self,
        query: Float[Tensor, "B Q N D"],
        keys: Float[Tensor, "B H T D"],
        positions: Int64[Tensor, "B H T"],
        has_empty: bool,
        scaling: float | int,
        softcap: float | None,
        sink_logits: Tensor | None,
        values: Float[Tensor, "B H T D2"] | None = None,
    ) -> Float[Tensor, "B Q N D2"] | None:
        """Adds the edges of the queries of the last N slots; with `values`, returns the output of their attention."""
        aggregation = "per_head" if self.aggregation == "per_head" else "query_group"
        first, asked = None, positions[:, 0, -query.shape[2] :]
        if has_empty:
            query, asked, keys, positions, first = _empty_in_front(query, asked, keys, positions)
        options = (scaling, self.top_k, self._num_sinks, aggregation, self._group_mean, first, softcap, sink_logits)
        if values is None:
            output, edges = None, topk_edges(query, keys, *options, query_stride=self.stride)
        else:
            output, *lists = topk_attention(query, keys, values, *options, query_stride=self.stride)
            edges = TopKEdges(*lists)
        self.add(asked, _at(positions, edges.indices), edges.weights, self.stride)
        return output

    def add(self, queries: Int64[Tensor, "B N"], keys: Tensor, weights: Tensor, repeats: int = 1) -> None:
        """Edges from positions `queries` to positions `keys` `[B, U, N, k]`, -1 for none; of `repeats` queries each."""
        self._queries.append(queries)
        self._keys.append(keys.int())
        self._weights.append(weights.float())
        self._repeats.append(repeats)

    def of(self, row: int, graph: int) -> "GraphEdges":
        """The edges of one graph as they are now; nothing is copied yet."""
        units = slice(None) if self.aggregation == "per_layer" else slice(graph, graph + 1)
        return GraphEdges(
            [queries[row] for queries in self._queries],
            [keys[row, units] for keys in self._keys],
            [weights[row, units] for weights in self._weights],
            list(self._repeats),
        )

    def clear(self) -> None:
        self._queries, self._keys, self._weights, self._repeats = [], [], [], []

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._queries, self._keys, self._weights = (
            [function(tensor) for tensor in tensors] for tensors in (self._queries, self._keys, self._weights)
        )

    @property
    def stored_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in (*self._queries, *self._keys, *self._weights))


class EdgeArrays(NamedTuple):
    """Edges of one graph on the host, E of them.

    Args:
        query, key: `[E]` positions.
        weight: `[E]` float64 attention of the query to the key.
        repeats: `[E]` float64, how many queries the edge's query stands for.
        seen: positions of all queries, of those without edges, too.
    """

    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray
    repeats: np.ndarray
    seen: np.ndarray


class GraphEdges(NamedTuple):
    """Pieces of the edges of one graph: positions of queries `[N]`, of keys `[U, N, k]`, and weights; U > 1: summed."""

    queries: list[Tensor]
    keys: list[Tensor]
    weights: list[Tensor]
    repeats: list[int]

    def arrays(self) -> EdgeArrays:
        """The edges one by one. Waits for the device."""
        parts = []
        for queries, keys, weights, repeats in zip(*self):
            keys, weights = keys.cpu().numpy(), weights.cpu().numpy().astype(np.float64) / keys.shape[0]
            sources = np.broadcast_to(queries.cpu().numpy()[None, :, None], keys.shape)
            real = (keys >= 0) & (weights > 0) & (sources >= 0)
            parts.append((sources[real], keys[real], weights[real], np.full(int(real.sum()), float(repeats))))
        columns = (np.concatenate(column) for column in zip(*parts))
        seen = np.concatenate([queries.cpu().numpy() for queries in self.queries])
        return EdgeArrays(*columns, seen[seen >= 0])


def attention_graph(
    query: np.ndarray,
    key: np.ndarray,
    weight: np.ndarray,
    num_nodes: int,
    direct_weight: float | int,
    repeats: np.ndarray | float | int = 1,
) -> csr_matrix:
    """The symmetric graph of CommunityKV (arXiv 2610.00418, design 1), without self-loops, indices sorted.

    `w = direct / 2 (R A + (R A)^T) + (1 - direct) A^T R A`, where row m of A holds the top-k weights of query m and the
    diagonal R says how many queries it stands for (the paper's graph: 1). A query has k edges and k^2 pairs of keys, so
    memory is linear in the number of tokens.
    """
    attention = csr_matrix((weight * repeats, (query, key)), shape=(num_nodes, num_nodes))
    graph = direct_weight / 2 * (attention + attention.T)
    if direct_weight < 1:
        # The root on both sides, and not R on one, keeps the product symmetric to the last bit.
        root = csr_matrix((weight * np.sqrt(repeats), (query, key)), shape=(num_nodes, num_nodes))
        graph = graph + (1 - direct_weight) * (root.T @ root)
    graph = graph.tocsr()
    graph.setdiag(0)
    graph.eliminate_zeros()
    graph.sort_indices()
    return graph


def _empty_in_front(
    query: Tensor, asked: Int64[Tensor, "B N"], keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same rows as under left padding, and `[B]` their first tokens: padding inside a row takes no weight then.

    Queries are put in order by themselves: those that are padding would stand at tokens of an earlier forward, and their
    position -1 tells that they leave no edges. Waits for the device, at forwards of several tokens of batches with padding.

    Args:
        asked: positions of the queries.
    """
    valid = positions[:, 0] >= 0
    first = (~valid).sum(dim=-1)
    if not bool((valid[:, :-1] & ~valid[:, 1:]).any()):
        return query, asked, keys, positions, first
    order = valid.int().argsort(dim=-1, stable=True)
    of_queries = (asked >= 0).int().argsort(dim=-1, stable=True)
    query = query.gather(2, of_queries[:, None, :, None].expand_as(query))
    keys = keys.gather(2, order[:, None, :, None].expand_as(keys))
    positions = positions.gather(2, order[:, None].expand_as(positions))
    return query, asked.gather(1, of_queries), keys, positions, first


def _at(positions: Tensor, columns: Tensor) -> Tensor:
    """Positions of key columns `[B, U, N, k]`; -1 stays."""
    units = columns.shape[1]
    by_unit = (
        positions if units == positions.shape[1] else positions.repeat_interleave(units // positions.shape[1], dim=1)
    )
    flat = by_unit.gather(-1, columns.clamp(min=0).flatten(2).long()).view(columns.shape)
    return torch.where(columns < 0, -1, flat)


class NewEdges:
    """Edges of decoded tokens, in room that is made once.

    Args:
        room: tokens.
        like: `[B, U, k]` the weights of one step.
    """

    def __init__(self, room: int, like: Tensor):
        batch, units, top_k = like.shape
        self._queries = torch.full((batch, room), -1, dtype=torch.int64, device=like.device)
        self._keys = torch.full((batch, units, room, top_k), -1, dtype=torch.int32, device=like.device)
        self._weights = torch.zeros(batch, units, room, top_k, device=like.device)
        self._count = 0

    def append(self, step: DecodeStep, weights: Float[Tensor, "B U k"], slots: Int[Tensor, "B U k"]) -> None:
        self._queries[:, self._count] = step.positions[:, 0, -1]
        self._keys[:, :, self._count] = _at(step.positions, slots[:, :, None])[:, :, 0]
        self._weights[:, :, self._count] = weights
        self._count += 1

    def move_to(self, edges: EdgeStore) -> None:
        """Adds everything to `edges` and is empty afterwards."""
        if self._count == 0:
            return
        used = slice(0, self._count)
        edges.add(self._queries[:, used].clone(), self._keys[:, :, used].clone(), self._weights[:, :, used].clone())
        self._count = 0

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._queries, self._keys, self._weights = (
            function(self._queries),
            function(self._keys),
            function(self._weights),
        )

    @property
    def stored_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in (self._queries, self._keys, self._weights))
