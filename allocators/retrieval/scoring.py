"""How a query rates regions: by their centroid, or by the bounds of their keys."""

from typing import NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor

from kvstitch.allocators.retrieval.store import RegionStore

COMBINATIONS = ("mean", "max", "softmax_sum")
SELECTIONS = ("kv_head", "query_head")


class Ratings(NamedTuple):
    """How the regions of a layer are rated at one step.

    Args:
        ratings: `[B, S, C]` for each of S selections, higher = read first; -inf for regions without members.
        scores: `[B, U, N, C]` of the N query heads of each unit with each representative; None if not asked for.
    """

    ratings: Float32[Tensor, "B S C"]
    scores: Float32[Tensor, "B U N C"] | None


def rate_regions(
    store: RegionStore,
    query: Float32[Tensor, "B Q 1 D"],
    combine: str,
    select: str,
    scaling: float | int,
    bounds: bool = False,
    want_scores: bool = False,
) -> Ratings:
    """Rates every region for every selection.

    Args:
        store: regions of U units: H, or Q where each query head has its own.
        query: float32.
        combine: over the heads that select together: "mean" or "max" of their scores, or "softmax_sum", the sum of
            their shares.
        select: "kv_head" for one selection a unit, "query_head" for one a query head.
        scaling: factor on q.k, which only "softmax_sum" feels.
        bounds: representatives are the largest and the smallest of each dimension; the score is then the largest q.k
            that any key between them can have (Quest, arXiv 2406.10774).
        want_scores: whether the scores of single heads are needed, too.
    """
    rows = query_rows(query, store.starts.shape[1], bounds)
    if combine == "mean" and select == "kv_head" and not bounds and not want_scores:
        # The mean of the scores is the score of the mean.
        return Ratings(store.score(rows.mean(dim=2, keepdim=True))[:, :, 0], None)
    scores = store.score(rows)
    if select == "query_head":
        return Ratings(scores.flatten(1, 2), scores if want_scores else None)
    return Ratings(combined(scores, combine, scaling), scores if want_scores else None)


def query_rows(query: Float32[Tensor, "B Q 1 D"], units: int, bounds: bool) -> Float32[Tensor, "B U N E"]:
    """What representatives are multiplied with: the queries of each unit, for bounds split by sign."""
    batch, query_heads, _, dim = query.shape
    rows = query.view(batch, units, query_heads // units, dim)
    return torch.cat((rows.clamp(min=0), rows.clamp(max=0)), dim=-1) if bounds else rows


def combined(scores: Float32[Tensor, "B S N C"], combine: str, scaling: float | int) -> Float32[Tensor, "B S C"]:
    """One rating for the heads that select together; -inf where all scores are."""
    if scores.shape[2] == 1:
        return scores[:, :, 0]
    if combine == "mean":
        return scores.mean(dim=2)
    if combine == "max":
        return scores.amax(dim=2)
    shares = (scores * scaling).softmax(dim=-1).sum(dim=2)
    return shares.masked_fill_(scores[:, :, 0] == -torch.inf, -torch.inf)
