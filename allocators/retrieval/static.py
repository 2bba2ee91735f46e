"""Static eviction over the same graph: what is not chosen when the prompt is complete is never read again."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from scipy.sparse import csr_matrix
from torch import Tensor

from kvstitch.allocators.options import check_counts, check_fractions
from kvstitch.allocators.retrieval.base import DecodeStep, LayerFrame, LayerIndex, ReadPlan, Reads, RetrievingAllocator
from kvstitch.allocators.retrieval.graph import EdgeStore, attention_graph, check_neighbours
from kvstitch.allocators.retrieval.plain import PlainIndex
from kvstitch.views import LayerView

_STRONGEST = 1 - 1e-6


class StaticIndex(PlainIndex):
    """A choice of slots that is made once."""

    def __init__(self, frame: LayerFrame, edges: EdgeStore, direct_weight: float | int, rounds: int):
        super().__init__(frame, 1)
        self._edges, self._direct_weight, self._rounds = edges, direct_weight, rounds
        self._chosen: Tensor | None = None

    def observe(self, query, keys, positions, has_empty):
        frame = self.frame
        self._edges.observe(query, keys, positions, has_empty, frame.scaling, frame.softcap, frame.sink_logits)

    def build(
        self, view: LayerView, plan: ReadPlan, scores: Float32[Tensor, "B H T"] | None = None
    ) -> Int64[Tensor, "B H T"] | None:
        order = super().build(view, plan)
        body, positions = self.parts.body, view.positions
        if order is not None:
            body, positions = body.gather(-1, order), positions.gather(-1, order)
        chosen = torch.zeros(*positions.shape[:2], max(plan.retrieved), dtype=torch.int64, device=positions.device)
        for row, count in enumerate(plan.retrieved):
            for head in range(positions.shape[1]):
                inside = body[row, head].nonzero()[:, 0]
                importance = self._rank(row, head, positions[row, head, inside].cpu().numpy(), count)
                best = inside[torch.from_numpy(importance[:count]).to(inside.device)]
                chosen[row, head, : len(best)] = best
                # A row shorter than its budget is not evicted from before it is full: those that leave the window come
                # next. The buffer counts them, and hides the columns of those that are still to come.
                leaves_next = max(self.parts.boundary, self.parts.first[row] + plan.num_sinks)
                room = chosen.shape[-1] - len(best)
                chosen[row, head, len(best) :] = leaves_next + torch.arange(room, device=chosen.device)
        self._chosen = chosen
        return order

    def _rank(self, row: int, head: int, positions: np.ndarray, count: int) -> np.ndarray:
        """Indices into `positions`, the most important first; the newest first where nothing is known."""
        newest = np.argsort(-positions, kind="stable")
        if self._edges.is_empty or not len(positions):
            return newest
        query, key, weight, _, _ = self._edges.of(row, head).arrays()
        nodes = int(max(query.max(initial=0), key.max(initial=0), positions.max())) + 1
        received = np.bincount(key, weight, nodes)[positions]
        graph = attention_graph(query, key, weight, nodes, self._direct_weight)[positions][:, positions].tocsr()
        return decayed_ranking(received, graph, count, self._rounds, newest)

    def select(self, step: DecodeStep) -> Reads:
        # Tokens that leave the window are evicted, too, from a row that is full.
        self._buffer.advance(step.length)
        slots, complete = self._buffer.fill(self._chosen, step)
        return Reads(slots, complete)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(function)
        self._edges.map_rows(function)
        self._chosen = None if self._chosen is None else function(self._chosen)

    @property
    def stored_bytes(self) -> int:
        return self._edges.stored_bytes + (0 if self._chosen is None else self._chosen.untyped_storage().nbytes())


def decayed_ranking(importance: np.ndarray, graph: csr_matrix, count: int, rounds: int, ties: np.ndarray) -> np.ndarray:
    """The most important nodes, where each choice makes its neighbours less important (after GraphKV).

    A round takes its share of the best that are left; then each chosen node i lowers its neighbours j by the factor
    `1 - w_ij / max_k w_ik`.

    Args:
        importance: `[n]`, not negative.
        graph: `[n, n]` symmetric weights.
        count: nodes wanted.
        rounds: choices after which neighbours are lowered; 1 is plain ranking.
        ties: order among equals.

    Returns: `count` nodes, or all n if there are fewer.
    """
    left, heaviest = importance.astype(np.float64), graph.max(axis=1).toarray().ravel()
    shares = graph.multiply(1 / np.maximum(heaviest, np.finfo(np.float64).tiny)[:, None]).tocsr()
    shares.data = np.log1p(-np.minimum(shares.data, _STRONGEST))
    rank_of_tie = np.empty(len(ties), np.int64)
    rank_of_tie[ties] = np.arange(len(ties))
    chosen: list[np.ndarray] = []
    open_nodes = np.ones(len(left), dtype=bool)
    wanted = min(count, len(left))
    for turn in range(rounds):
        size = wanted * (turn + 1) // rounds - wanted * turn // rounds
        order = np.lexsort((rank_of_tie, -left, ~open_nodes))
        picked = order[:size]
        chosen.append(picked)
        open_nodes[picked] = False
        left *= np.exp(np.asarray(shares[picked].sum(axis=0)).ravel())
    return np.concatenate(chosen)


@dataclass(frozen=True, kw_only=True)
class GraphEviction(RetrievingAllocator):
    """Static eviction by the attention graph (after GraphKV, arXiv 2509.00388), over CommunityKV's graph.

    When the prompt is complete each kv head keeps the tokens that received most attention, where a chosen token makes
    its neighbours in the graph count less. Nothing else of the prompt is read again, nor what leaves the window once the
    budget is full. It is here to compare choosing once with choosing anew at every step; it frees no memory.

    Args:
        top_k, direct_weight: the graph, see `CommunityRetrieval`.
        rounds: choices after which neighbours count less; 1 for plain ranking.
    """

    top_k: int = 8
    direct_weight: float | int = 0.5
    rounds: int = 8

    def __post_init__(self):
        check_counts(self, {"top_k": 1, "rounds": 1})
        check_fractions(self, ("direct_weight",))

    def check_prompt(self, num_tokens: int, num_sinks: int) -> None:
        check_neighbours(self.top_k, num_tokens, num_sinks)

    def start(self, frame: LayerFrame) -> LayerIndex:
        edges = EdgeStore(self.top_k, frame.num_sinks, "query_group")
        return StaticIndex(frame, edges, self.direct_weight, self.rounds)
