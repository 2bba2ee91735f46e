"""Ranges of slots read one after another."""

import torch
from jaxtyping import Int64
from torch import Tensor


def expand_ranges(
    starts: Int64[Tensor, "B U K"], sizes: Int64[Tensor, "B U K"], ends: Int64[Tensor, "B U K"], width: int
) -> Int64[Tensor, "B U W1"]:
    """The first `width` slots of ranges in the given order, and one column more that means nothing.

    Args:
        starts: first slot of each range.
        sizes: slots in each range, 0 allowed.
        ends: running sum of `sizes`.

    Returns: `[B, U, width + 1]`; entries from the ranges' total on, and the last column, are meaningless.
    """
    # Inside a range the slot grows by one; where a range begins it jumps. Jumps add up where ranges are empty.
    jumps = starts.clone()
    jumps[..., 1:] -= starts[..., :-1] + sizes[..., :-1]
    begins = (ends - sizes).clamp_(max=width)
    steps = starts.new_ones(*starts.shape[:-1], width + 1)
    steps[..., 0] = 0
    return steps.scatter_add_(-1, begins, jumps).cumsum(-1)
