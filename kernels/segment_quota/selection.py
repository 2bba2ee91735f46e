"""The slots that segments with quotas keep; plain torch."""

from torch import Tensor

from kvstitch.kernels.common.selection import ascending_slots, mark_best, mark_protected, regions_of_edges


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
    must = mark_protected(num_first, first_recent, valid, scores.shape[-1])
    segments = regions_of_edges(slot_edges, scores.shape[-1])
    if must_keep == "after":
        candidates = mark_best(scores, quotas, segments, None, valid)
        kept = mark_best(scores, quotas.sum(dim=-1, keepdim=True), None, must, candidates | must)
    else:
        kept = mark_best(scores, quotas, segments, must, valid)
    return ascending_slots(kept, width)
