"""Global top-k: one region per head."""

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.limits import Limits
from kvstitch.allocators.options import check_choices, check_counts
from kvstitch.allocators.selector import protected, select, slots_of
from kvstitch.kernels.segment_quota.reference import protected_limits
from kvstitch.views import LayerView


@dataclass(frozen=True, kw_only=True)
class GlobalTopK(EvictingAllocator):
    """The best scores of each head, after its first and last tokens: what every method without regions does.

    Args:
        num_sinks: first valid slots that are always kept.
        num_recent: last valid slots that are always kept.
        must_priority: who goes without if the budget cannot hold both: "sink" shortens the recent window, "suffix" the
            sinks.
    """

    num_sinks: int = 4
    num_recent: int = 32
    must_priority: str = "sink"

    def __post_init__(self):
        check_counts(self, {"num_sinks": 0, "num_recent": 0})
        check_choices(self, {"must_priority": ("sink", "suffix")})

    def allocate(
        self,
        view: LayerView,
        scores: Float32[Tensor, "B H T"],
        keep: Int64[Tensor, "B"],
        state: dict[str, Tensor],
    ) -> Selection:
        batch, heads, slots = scores.shape
        limits = Limits.of(keep, batch, scores.device)
        count = view.valid.sum(dim=-1, keepdim=True)
        quota = limits.rows[:, None, None].minimum(count)
        must = protected(
            *protected_limits(quota, count, self.num_sinks, self.num_recent, self.must_priority), view.valid, slots
        )
        chosen = select(scores, quota, must=must, valid=view.valid)
        return Selection(slots_of(chosen, min(limits.most, slots)))
