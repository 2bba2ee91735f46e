"""Ranges of slots read one after another."""

import torch
from jaxtyping import Int64
from torch import Tensor


def expand_ranges(
    starts: Int64[Tensor, "B U K"],
    sizes: Int64[Tensor, "B U K"],
    ends: Int64[Tensor, "B U K"],
    steps: Int64[Tensor, " W1"],
) -> Int64[Tensor, "B U W1"]:
    """The first W slots of ranges in the given order, and one column more that means nothing.

    Args:
        starts: first slot of each range.
        sizes: slots in each range, 0 allowed.
        ends: running sum of `sizes`.
        steps: from `unit_steps`; not changed.

    Returns: entries from the ranges' total on, and the last column, are meaningless.
    """
    # Inside a range the slot grows by one; where a range begins it jumps. Jumps add up where ranges are empty.
    jumps = starts.clone()
    jumps[..., 1:].sub_((starts + sizes)[..., :-1])
    begins = (ends - sizes).clamp_(max=steps.shape[-1] - 1)
    return torch.scatter_add(steps.expand(*starts.shape[:2], -1), -1, begins, jumps).cumsum_(-1)


def unit_steps(width: int, device: torch.device) -> Int64[Tensor, " W1"]:
    """0, 1, 1, …: what slots grow by inside a range that begins at column 0."""
    steps = torch.ones(width + 1, dtype=torch.int64, device=device)
    steps[0] = 0
    return steps
