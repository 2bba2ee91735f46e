"""The k largest of each row, with one fixed order among equals; plain torch."""

import torch
from torch import Tensor

# Columns of a tile and of a part of one; wide enough for vector instructions, few enough to leave short lists.
TILE, _PART = 32, 8
_LOW_BITS = 0xFFFFFFFF


def largest(weights: Tensor, indices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights of each row, descending; the lower index first among equals.

    Args:
        weights: `[R, C]` float32 or float64, not negative, no NaN.
        indices: `[R, C]` or `[C]` int64 in [0, 2**31), what to report for each entry.

    Returns: weights `[R, count]` and indices int64 `[R, count]`; the index of a zero weight is -1, and both are padded
        so where a row has fewer than `count` entries.
    """
    if weights.dtype == torch.float32:
        return _unpack(_keys(weights, _LOW_BITS - indices), count)
    by_index = indices.expand_as(weights).sort(dim=-1)
    top_weights, order = weights.gather(-1, by_index.indices).sort(dim=-1, descending=True, stable=True)
    return _pad(top_weights[..., :count], by_index.values.gather(-1, order[..., :count]), count)


def largest_columns(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`largest` over wide rows at the speed of memory: the k best lie in the k tiles with the largest maxima.

    Proof: order entries by (weight, lower index first), and tiles by their best entry; as a tile is contiguous,
    comparing tiles by (maximum, lower tile first) is the same order. If an entry of the k best lay in a tile that is
    not among the k best tiles, k tiles would each hold an entry before it: a contradiction. The same holds for the
    parts of the tiles that are left.

    Args:
        weights: `[R, C]` contiguous, not negative; `TILE` divides C.

    Returns: as `largest`, indices are columns.
    """
    rows, columns = weights.shape
    device = weights.device
    if columns // TILE <= count:
        return largest(weights, torch.arange(columns, device=device), count)
    candidates, ids = weights.view(rows, -1, TILE), torch.arange(columns // TILE, device=device)
    for size, part in ((TILE, _PART), (_PART, 1)):
        best = _best_ids(candidates.amax(dim=-1), ids, count)
        first = torch.arange(0, rows * columns // size, columns // size, device=device)[:, None]
        candidates = weights.view(-1, size).index_select(0, (best + first).flatten()).view(rows, -1, part)
        ids = ((best * (size // part))[:, :, None] + torch.arange(size // part, device=device)).flatten(1)
    return largest(candidates.flatten(1), ids, count)


def _best_ids(maxima: Tensor, ids: Tensor, count: int) -> Tensor:
    """`[R, count]` ids of the largest maxima of each row, the lower id first among equals, in any order.

    In float64 no integer holds weight and id; there the ids must ascend in each row, and do in the result.
    """
    if maxima.dtype == torch.float32:
        keys = _keys(maxima, _LOW_BITS - ids)
        return _LOW_BITS - (keys.topk(count, dim=-1, sorted=False).values & _LOW_BITS)
    best = maxima.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return ids.expand_as(maxima).gather(-1, best.sort(dim=-1).values)


def _keys(weights: Tensor, inverted: Tensor) -> Tensor:
    """int64 keys that order like (weight, lower index first); `inverted` is 2**32 - 1 - index.

    The bits of non-negative floats order as integers do, so one integer carries weight and index.
    """
    return weights.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(inverted)


def _unpack(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = keys.topk(min(count, keys.shape[-1]), dim=-1).values
    return _pad((best >> 32).int().view(torch.float32), _LOW_BITS - (best & _LOW_BITS), count)


def _pad(weights: Tensor, indices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    indices = indices.masked_fill(weights == 0, -1)
    missing = (0, count - weights.shape[-1])
    if missing[1]:
        weights = torch.nn.functional.pad(weights, missing)
        indices = torch.nn.functional.pad(indices, missing, value=-1)
    return weights, indices
