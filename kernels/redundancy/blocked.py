"""Key redundancy by blocks of rows: the similarity matrix never exists."""

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

# Elements of a block of similarities. On the CPU a block that stays in the cache halves the time at T = 768 (measured,
# one thread, 3 heads of 64: 4.6 ms at 2^18, 5.7 ms unblocked); a GPU wants large launches.
_BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
_LEAST_ROWS = 64


def redundancy_blocked(
    keys: Float32[Tensor, "B H T D"], members: Bool[Tensor, "B H T"], threshold: float
) -> Float32[Tensor, "B H T"]:
    """See `api.key_redundancy`. Column sums come from one product with the sum of all unit keys; blocks only look for
    the entry of each row that is not counted."""
    unit = F.normalize(torch.where(members[..., None], keys, keys.new_zeros(())), dim=-1, eps=1e-12)
    newest_twin = _newest_twins(unit, threshold)

    has_twin = newest_twin >= 0
    index = newest_twin.clamp(min=0)
    # Whole rows by flat index: a gather along the slots goes element by element.
    batch, heads, slots, _ = unit.shape
    first = torch.arange(0, batch * heads * slots, slots, device=unit.device).view(batch, heads, 1)
    twins = unit.flatten(0, 2).index_select(0, (index + first).flatten()).view_as(unit)
    uncounted = (unit * twins).sum(dim=-1).masked_fill(~has_twin, 0.0)

    sums = torch.matmul(unit, unit.sum(dim=2)[..., None]).squeeze(-1) - unit.square().sum(dim=-1)
    sums = sums.scatter_add(2, index, -uncounted)
    mean = sums / members.sum(dim=-1, keepdim=True).clamp(min=1)
    weights = mean.masked_fill(~members, torch.finfo(torch.float32).min).softmax(dim=-1)
    return weights.masked_fill(~members, 0.0)


def _newest_twins(unit: Float32[Tensor, "B H T D"], threshold: float) -> Int64[Tensor, "B H T"]:
    """Largest other slot whose cosine with the row's key exceeds `threshold`, -1 if there is none."""
    batch, heads, slots, _ = unit.shape
    elements = _BLOCK_ELEMENTS.get(unit.device.type, _BLOCK_ELEMENTS["cpu"])
    rows = min(slots, max(_LEAST_ROWS, elements // (batch * heads * slots)))
    # Slots are numbered from 1, so that 0 says "none"; float32 holds them exactly up to 2^24.
    numbers = torch.arange(1, slots + 1, device=unit.device, dtype=torch.float32)
    columns = unit.mT
    found = unit.new_empty(batch, heads, slots)
    for start in range(0, slots, rows):
        block = unit[:, :, start : start + rows] @ columns
        block.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
        # In place: a comparison into a new tensor and a torch.where cost more than the product itself.
        torch.amax(block.gt_(threshold).mul_(numbers), dim=-1, out=found[:, :, start : start + rows])
    return found.long() - 1
