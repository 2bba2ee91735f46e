"""Attention of a query window in plain torch; the shapes are checked in `api`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Later than every query.
_EMPTY_SLOT = math.inf
_LOWEST = torch.finfo(torch.float32).min
_LOG2_E = math.log2(math.e)


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


@torch.no_grad()
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
    visibility = _visibility(query_positions, positions)
    first = _first_hidden(visibility.missed)
    sees_any = _sees_any(visibility)
    # One for all layers: the pages of a fresh one would cost as much as the product.
    room = positions.new_empty(batch * heads, group * query_positions.shape[-1], slots, dtype=torch.float32)
    ranks, missed = visibility.rank[:, None, :, None].split(batch), visibility.missed[:, :, None, first:].split(batch)
    totals = []
    for query, key, scale, rank, before, counts in zip(queries, keys, scaling, ranks, missed, sees_any.split(batch)):
        logits = _logits(query, key, scale * _LOG2_E, room)
        if first < slots:
            logits[..., first:].masked_fill_((rank < before)[:, :, None], _LOWEST)
        totals.append(_summed_softmax_(logits, counts))
    watchers = (query_positions.shape[-1] - visibility.missed).clamp_(min=1)
    # An empty slot holds an exact zero unless no query of the row sees anything, and then the weights are zeros.
    return torch.cat(totals).div_(watchers.mul_(group))


def _summed_softmax_(logits: Tensor, counts: Tensor) -> Tensor:
    """Softmax to base 2 of `[B, H, G, W, T]`, summed over G and W: `[B, H, T]`; `counts` `[B, H, W]` weighs the queries.

    Probabilities are never written down: a product with one row of weights, 1 / total each, normalises and sums at once.
    To base 2, because the exponential of base e costs a CPU more than twice as much.
    """
    batch, heads, group, window, slots = logits.shape
    powers = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp2_()
    weights = counts[:, :, None] / powers.sum(dim=-1)
    return torch.bmm(weights.view(batch * heads, 1, -1), powers.view(batch * heads, -1, slots)).view(
        batch, heads, slots
    )


def _first_hidden(missed: Tensor) -> int:
    """First slot that any query may not see. Most slots are older than the window, and to hide is a pass over logits.

    On a GPU, where a look at values waits for the device: 0.
    """
    if missed.is_cuda:
        return 0
    hidden = (missed > 0).flatten(0, 1).any(dim=0)
    return int(torch.cat((hidden, hidden.new_ones(1))).int().argmax())


def _visibility(query_positions: Tensor, positions: Tensor) -> _Visibility:
    ordered = query_positions.sort(dim=-1).values
    # A missing query stands at -1, before every slot, and so sees none.
    rank = torch.searchsorted(ordered, query_positions.contiguous())
    missed = torch.searchsorted(ordered, positions.flatten(1)).view_as(positions)
    return _Visibility(rank.float(), missed.float().masked_fill_(positions < 0, _EMPTY_SLOT))


def _probabilities(queries: Tensor, keys: Tensor, visibility: _Visibility, scaling: float) -> Tensor:
    """`[B, H, G, W, T]`; a row that sees nothing is meaningless but finite."""
    logits = _logits(queries, keys, scaling)
    hidden = visibility.rank[:, None, :, None] < visibility.missed[:, :, None, :]
    # Whatever stands on an empty slot or in a missing query, NaN and infinity included, is written over.
    return logits.masked_fill_(hidden[:, :, None], _LOWEST).softmax(dim=-1)


def _logits(queries: Tensor, keys: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """`scaling * q . k`, `[B, H, G, W, T]` float32; `out` `[B * H, G * W, T]` is where to."""
    batch, heads, slots, head_dim = keys.shape
    # The G query heads of a kv head become rows of one product: keys are never repeated.
    folded = (queries.float() * scaling).reshape(batch * heads, -1, head_dim)
    logits = torch.bmm(folded, keys.float().reshape(batch * heads, slots, head_dim).transpose(1, 2), out=out)
    return logits.view(batch, heads, -1, queries.shape[2], slots)


def _sees_any(visibility: _Visibility) -> Tensor:
    """`[B, H, W]` float32: 1 where the query sees at least one slot, else 0."""
    first = visibility.missed.amin(dim=-1, keepdim=True)
    return (visibility.rank[:, None, :] >= first).float()
