"""Mass segments with quotas and the slots that they keep (AMS, arXiv 2605.23200): plan, then select."""

from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from kvstitch.kernels.common.dispatch import resolve_implementation
from kvstitch.kernels.segment_quota.reference import SegmentPlan, segment_plan_reference
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.kernels.segment_quota.selection import segment_select_reference


def segment_plan(
    usage: Float32[Tensor, "B H T"],
    credit: Float[Tensor, "B H C"] | None,
    keep: Int64[Tensor, "B"],
    least_keep: int,
    valid: Bool[Tensor, "B H T"] | None,
    rules: SegmentRules,
    impl: str = "auto",
) -> SegmentPlan:
    """Mass, segments and quotas of one event, all heads at once; see `SegmentPlan` and `segment_plan_reference`.

    With `mass_dtype="float32"` or `batch="batch_mean"` the Triton path leaves the mass to torch: the former exists to
    repeat the public code's rounding, the latter couples rows.

    Args:
        usage: window evidence, pooled and padded, not normalised.
        credit: from the previous event, C at most T, or None.
        keep: slots per head.
        least_keep: lower bound of `keep`, known on the host.
        valid: None if no slot is empty.
        rules: numbers and switches.
        impl: "auto" (Triton on CUDA tensors), "triton", "reference".
    """
    if resolve_implementation(impl, usage) == "reference":
        return segment_plan_reference(usage, credit, keep, least_keep, valid, rules)
    from kvstitch.kernels.segment_quota.triton import segment_plan_triton

    return segment_plan_triton(usage, credit, keep, valid, rules)


def segment_select(
    scores: Float32[Tensor, "B H T"],
    slot_edges: Int64[Tensor, "B H R1"],
    quotas: Int64[Tensor, "B H R"],
    num_first: Int64[Tensor, "B H 1"],
    first_recent: Int64[Tensor, "B H 1"],
    valid: Bool[Tensor, "B H T"] | None,
    must_keep: str,
    width: int,
    impl: str = "auto",
) -> Int64[Tensor, "B H width"]:
    """The slots that a plan keeps: in each segment its protected ones, then its best scores, `quotas` in all.

    Args:
        scores: higher = keep; equal ones go to the lower slot, NaN loses against everything.
        slot_edges, quotas, num_first, first_recent: of the `SegmentPlan`.
        valid: None if no slot is empty; an empty one is never kept.
        must_keep: as `SegmentRules`: with "after" segments first choose as if nothing were protected, then protected
            slots push out the lowest scores of the whole head.
        width: columns of the result, the most that a head keeps.
        impl: as `segment_plan`.

    Returns: ascending slots, -1 after the last one.
    """
    arguments = (scores, slot_edges, quotas, num_first, first_recent, valid, must_keep, width)
    if resolve_implementation(impl, scores) == "reference":
        return segment_select_reference(*arguments)
    from kvstitch.kernels.segment_quota.triton_select import segment_select_triton

    return segment_select_triton(*arguments)
