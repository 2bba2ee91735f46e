"""AdaKV: heads of a layer share one budget."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.limits import Limits
from kvstitch.allocators.options import check_choices, check_counts, check_fractions
from kvstitch.allocators.selector import protected, select, slots_of
from kvstitch.kernels.segment_quota.reference import protected_limits
from kvstitch.views import LayerView


@dataclass(frozen=True, kw_only=True)
class HeadAdaptive(EvictingAllocator):
    """The H * keep best scores of a layer, whatever their heads (AdaKV, arXiv 2407.11550).

    Each head first gets its own `floor(alpha * keep)` best slots, protected ones among them; the rest of the layer's
    budget goes to the best scores of all heads together. Scores must compare across heads, as attention does.

    Args:
        alpha: share of the budget that each head keeps for itself; 1 is `GlobalTopK`.
        mode: "ragged" gives back what is not kept: heads keep different numbers of slots (`details["counts"]`), padded
            with -1 to the width that one head could have had; a press cuts the columns that no head uses. "mask" frees
            nothing: all slots stay stored, and those not kept are hidden from attention for good.
        num_sinks: first valid slots that are always kept.
        num_recent: last valid slots that are always kept.
        must_priority: who goes without if the budget cannot hold both: "sink" shortens the recent window, "suffix" the
            sinks.
    """

    alpha: float | int = 0.2  # the paper's safeguard, as in kvpress
    mode: str = "ragged"
    num_sinks: int = 4
    num_recent: int = 32
    must_priority: str = "sink"

    def __post_init__(self):
        check_counts(self, {"num_sinks": 0, "num_recent": 0})
        check_fractions(self, ("alpha",))
        check_choices(self, {"mode": ("ragged", "mask"), "must_priority": ("sink", "suffix")})

    def allocate(
        self,
        view: LayerView,
        scores: Float32[Tensor, "B H T"],
        keep: Int64[Tensor, "B"],
        state: dict[str, Tensor],
    ) -> Selection:
        """In mode "mask" every slot of the view is returned, and `hidden` marks those that the layer drops."""
        batch, heads, slots = scores.shape
        limits = Limits.of(keep, batch, scores.device)
        kept = self._choose(scores, view.valid, limits.rows)
        details = {"counts": kept.sum(dim=-1)}
        if self.mode == "mask":
            every = torch.arange(slots, device=scores.device).expand_as(scores)
            return Selection(every, hidden=~kept, details=details)
        # One head may get everything: a tighter bound would have to read counts back from the device.
        return Selection(slots_of(kept, min(slots, heads * limits.most)), details=details)

    def _choose(
        self, scores: Float32[Tensor, "B H T"], valid: Bool[Tensor, "B H T"], keep: Int64[Tensor, "B"]
    ) -> Bool[Tensor, "B H T"]:
        batch, heads, slots = scores.shape
        count = valid.sum(dim=-1, keepdim=True)
        quota = keep[:, None, None].minimum(count)
        must = protected(
            *protected_limits(quota, count, self.num_sinks, self.num_recent, self.must_priority), valid, slots
        )
        own = (keep.double() * self.alpha + 1e-9).floor().long()[:, None, None].minimum(count)
        own = torch.maximum(own, must.sum(dim=-1, keepdim=True))
        guarded = select(scores, own, must=must, valid=valid)
        total = torch.minimum(keep * heads, count.sum(dim=1)[:, 0])[:, None, None]
        layer = (batch, 1, heads * slots)
        chosen = select(scores.reshape(layer), total, must=guarded.view(layer), valid=valid.reshape(layer))
        return chosen.view_as(scores)
