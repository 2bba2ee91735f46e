"""Attention of a query window in plain torch; the shapes are checked in `api`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A slot that a query cannot see gets -1e20 and more on its logit. An empty slot counts as 3e18 queries too late, so
# that its penalty stays inside float32 and outweighs whatever finite garbage its key holds.
_PENALTY = 1e20
_EMPTY_SLOT = 3e18


class _Visibility(NamedTuple):
    """Who sees whom, by order among the W query positions: a query sees a slot iff `missed <= rank`.

    rank: `[B, W]` float32, queries of the row that stand before this one.
    missed: `[B, H, T]` float32, queries of the row that stand before the slot; `_EMPTY_SLOT` on empty slots.
    """

    rank: Tensor
    missed: Tensor


def window_attention_reference(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, scaling: float
) -> Tensor:
    """Probabilities `[B, H, G, W, T]` float32; rows that see nothing are zero."""
    visibility = _visibility(query_positions, positions)
    probabilities = _probabilities(queries, keys, visibility, scaling)
    return probabilities.mul_(_sees_any(visibility)[:, :, None, :, None])


def window_usage_reference(
    queries: Sequence[Tensor],
    query_positions: Tensor,
    keys: Sequence[Tensor],
    positions: Tensor,
    scaling: Sequence[float],
) -> Tensor:
    """Probabilities summed over the window, averaged over the queries that see the slot and over G.

    Queries and keys come layer by layer, positions stacked along the batch, and so does the result, `[L B, H, T]`: who
    sees whom is worked out once for all layers, because in small operators the calls cost more than the arithmetic.
    """
    stacked, heads, slots = positions.shape
    batch, group = stacked // len(keys), queries[0].shape[1] // heads
    window = query_positions.shape[-1]
    visibility = _visibility(query_positions, positions)
    # A row of ones, zeros for queries that see nothing, times a matrix: the sum over G and W in a single pass.
    ones = _sees_any(visibility)[:, :, None].expand(stacked, heads, group, window).reshape(stacked * heads, 1, -1)
    totals = []
    for layer in range(len(keys)):
        rows = slice(layer * batch, (layer + 1) * batch)
        seen = _Visibility(visibility.rank[rows], visibility.missed[rows])
        probabilities = _probabilities(queries[layer], keys[layer], seen, scaling[layer])
        rows = slice(layer * batch * heads, (layer + 1) * batch * heads)
        totals.append(torch.bmm(ones[rows], probabilities.view(batch * heads, -1, slots)))
    watchers = (window - visibility.missed).clamp_(min=1)
    # An empty slot holds an exact zero unless no query of the row sees anything, and then the ones are zeros.
    return torch.cat(totals).view(stacked, heads, slots).div_(watchers.mul_(group))


def _visibility(query_positions: Tensor, positions: Tensor) -> _Visibility:
    ordered = query_positions.sort(dim=-1).values
    # A missing query stands at -1, before every slot, and so sees none.
    rank = torch.searchsorted(ordered, query_positions.contiguous())
    missed = torch.searchsorted(ordered, positions.flatten(1)).view_as(positions)
    return _Visibility(rank.float(), missed.float().masked_fill_(positions < 0, _EMPTY_SLOT))


def _probabilities(queries: Tensor, keys: Tensor, visibility: _Visibility, scaling: float) -> Tensor:
    """`[B, H, G, W, T]`; a row that sees nothing is meaningless but finite."""
    batch, heads, slots, head_dim = keys.shape
    window = queries.shape[2]
    # The G query heads of a kv head become rows of one product: keys are never repeated.
    folded = (queries.float() * scaling).reshape(batch * heads, -1, head_dim)
    logits = torch.bmm(folded, keys.float().reshape(batch * heads, slots, head_dim).transpose(1, 2))
    # Whatever stands on an empty slot or in a missing query, NaN and infinity included, becomes a finite logit.
    logits.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    penalty = visibility.rank[:, None, :, None] - visibility.missed[:, :, None, :]
    logits = logits.view(batch, heads, -1, window, slots)
    return logits.add_(penalty.clamp_(max=0).mul_(_PENALTY)[:, :, None]).softmax(dim=-1)


def _sees_any(visibility: _Visibility) -> Tensor:
    """`[B, H, W]` float32: 1 where the query sees at least one slot, else 0."""
    first = visibility.missed.amin(dim=-1, keepdim=True)
    return (visibility.rank[:, None, :] >= first).float()
