"""What the bench times of mass segments, and the least work that they must do."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvstitch.kernels.segment_quota.api import segment_plan, segment_select
from kvstitch.kernels.segment_quota.rules import SegmentRules

# The switches of the recommended preset.
RECOMMENDED_RULES = SegmentRules(
    segment_mass=0.1,
    min_segment_tokens=16,
    max_segment_tokens=256,
    min_keep_tokens=1,
    credit_decay=0.9,
    credit_mix=0.9,
    num_sinks=4,
    num_recent=32,
    must_keep="first_counted",
    must_priority="sink",
    boundary="include",
    split="even",
    merge="forward_then_tail",
    quota="waterfill",
    credit=True,
    credit_init="zero",
    credit_scale="mass",
    batch="per_sample",
    mass_dtype="float64",
)
# What the public code does, but for its mean over the batch.
REFERENCE_RULES = replace(
    RECOMMENDED_RULES,
    segment_mass=0.02,
    min_segment_tokens=32,
    max_segment_tokens=1024,
    min_keep_tokens=8,
    credit_decay=0.8,
    credit_mix=0.7,
    must_keep="after",
    must_priority="suffix",
    boundary="exclude",
    split="chunk",
    merge="forward",
    quota="reference",
    mass_dtype="float32",
)


@dataclass(frozen=True)
class SegmentQuotaWorkload:
    """Plan and selection of one event over `keep` slots that were kept before and `interval` new ones.

    Args:
        batch: rows; layers may be stacked along them (the default is the 36 layers of Qwen3-8B at batch 1).
        heads: kv heads.
        keep, interval: slots kept, and slots that came since.
    """

    batch: int = 36
    heads: int = 8
    keep: int = 4096
    interval: int = 512

    def inputs(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        new = lambda last: torch.rand(self.batch, self.heads, last, generator=generator, device=device)
        return {
            "scores": new(self.keep + self.interval),
            # A high power of uniform numbers: a few slots hold most of the mass, as in attention.
            "usage": new(self.keep + self.interval) ** 9,
            "credit": new(self.keep) ** 9,
            "keep": torch.full((self.batch,), self.keep, device=device),
        }

    def run(self, inputs: dict[str, Tensor], impl: str) -> Tensor:
        plan = segment_plan(
            inputs["usage"], inputs["credit"], inputs["keep"], self.keep, None, RECOMMENDED_RULES, impl=impl
        )
        tensors = (plan.slot_edges, plan.quotas, plan.num_first, plan.first_recent)
        return segment_select(inputs["scores"], *tensors, None, RECOMMENDED_RULES.must_keep, self.keep, impl=impl)

    def floor_flops(self) -> int:
        return 0

    def floor_bytes(self) -> int:
        """Scores, evidence and credit read once, the new credit (float64) and the slots written once."""
        slots = self.keep + self.interval
        return self.batch * self.heads * (4 * (2 * slots + self.keep) + 8 * (slots + self.keep))
