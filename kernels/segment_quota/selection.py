"""The slots that segments with quotas keep; plain torch."""

import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1


def segment_select_reference(
    scores: Tensor,
    slot_edges: Tensor,
    quotas: Tensor,
    num_first: Tensor,
    first_recent: Tensor,
    valid: Tensor | None,
    must_keep: str,
    width: int,
) -> Tensor:
    """Arguments and result of `api.segment_select`."""
    slots = scores.shape[-1]
    present = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    rank = present.cumsum(dim=-1)
    must = ((rank <= num_first) | (rank > first_recent)) & present
    place = torch.arange(slots, device=scores.device).expand_as(rank).contiguous()
    segment = torch.searchsorted(slot_edges[..., 1:-1].contiguous(), place, right=True)
    if must_keep == "after":
        candidates = _best(scores, segment, quotas, torch.zeros_like(must), present)
        whole, total = torch.zeros_like(segment), quotas.sum(dim=-1, keepdim=True)
        kept = _best(scores, whole, total, must, candidates | must)
    else:
        kept = _best(scores, segment, quotas, must, present)
    order = torch.where(kept, place, slots).sort(dim=-1).values[..., :width]
    return order.masked_fill(order == slots, -1)


def _best(scores: Tensor, segment: Tensor, quotas: Tensor, must: Tensor, present: Tensor) -> Tensor:
    """Marks the `quotas` best of each segment: protected ones, then by score, then by slot; NaN last, empty never."""
    bits = (scores.nan_to_num(nan=float("-inf")) + 0.0).view(torch.int32)
    # Bits of floats order as integers once the magnitude of negative ones is flipped.
    priority = (_INT32_MAX - torch.where(bits < 0, bits ^ _INT32_MAX, bits).long()).masked_fill(must, 0)
    priority = priority.masked_fill(~present, 2**32 - 1)
    ordered, order = ((segment << 32) | priority).sort(dim=-1, stable=True)
    ordered_segment = ordered >> 32
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(order).contiguous()
    inside = place - torch.searchsorted(ordered_segment.contiguous(), ordered_segment.contiguous())
    chosen = inside < quotas.gather(-1, ordered_segment)
    return torch.zeros_like(must).scatter(-1, order, chosen)
