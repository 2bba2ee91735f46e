"""A budget in slots per kv head, as the host and as the device need it."""

from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor


class Limits(NamedTuple):
    """Slots that each row may hold.

    Args:
        least: the smallest row's.
        most: the largest row's; the result of a selection is this wide, or T if that is less.
        rows: `[B]` int64 on the device of the scores.
    """

    least: int
    most: int
    rows: Tensor

    @classmethod
    def of(cls, keep: int | Int64[Tensor, "B"], batch: int, device: torch.device) -> "Limits":
        """From one budget for all rows, or one a row.

        A budget on the CPU is read without waiting for a device: that is where a press keeps it. One that lives on a
        GPU costs a synchronisation.

        Raises: TypeError if it is no whole number; ValueError if a budget is below 1 or their number is not the batch size.
        """
        whole = isinstance(keep, Tensor) and not keep.is_floating_point() and keep.dtype != torch.bool
        if isinstance(keep, bool) or not (isinstance(keep, int) or whole):
            raise TypeError(f"keep must be a whole number of slots, or a tensor of them, got {keep!r}")
        if isinstance(keep, int):
            least = most = keep
            rows = torch.full((batch,), keep, device=device)
        else:
            if tuple(keep.shape) != (batch,):
                raise ValueError(f"keep must be an int or have shape ({batch},), got {tuple(keep.shape)}")
            values = keep.tolist()
            least, most = min(values), max(values)
            rows = keep.to(device, non_blocking=True)
        if least < 1:
            raise ValueError(f"keep must be at least 1 slot per kv head, got {least}")
        return cls(least, most, rows)
