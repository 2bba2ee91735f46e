"""The kernels of mass segments against the torch path, with rules drawn at random."""

import random

import pytest
import torch

from kvstitch.kernels.segment_quota.api import segment_plan, segment_select
from kvstitch.kernels.segment_quota.rules import SegmentRules


def any_rules(draw):
    """Any options that may be combined."""
    shortest = draw.randint(1, 9)
    return SegmentRules(
        segment_mass=draw.choice([0.02, 0.1, 0.23, 0.5, 1.0]),
        min_segment_tokens=shortest,
        max_segment_tokens=2 * shortest + draw.randint(0, 20),
        min_keep_tokens=draw.randint(0, 6),
        credit_decay=draw.choice([0.0, 0.8, 0.9]),
        credit_mix=draw.choice([0.0, 0.7, 1.0]),
        num_sinks=draw.randint(0, 5),
        num_recent=draw.randint(0, 9),
        must_keep=draw.choice(["first_counted", "first_separate", "after"]),
        must_priority=draw.choice(["sink", "suffix"]),
        boundary=draw.choice(["include", "exclude"]),
        split=draw.choice(["even", "chunk"]),
        merge=draw.choice(["forward_then_tail", "forward"]),
        quota=draw.choice(["waterfill", "length", "reference"]),
        credit=draw.choice([True, True, False]),
        credit_init=draw.choice(["zero", "mass"]),
        credit_scale=draw.choice(["mass", "usage"]),
        batch="per_sample",
        mass_dtype=draw.choice(["float64", "float64", "float32"]),
        segment_tokens=draw.choice([None, None, None, draw.randint(1, 30)]),
    )


def any_layer(draw, seed):
    """Two rows of one head: scores with ties, NaN and infinities, evidence, credit, budgets and holes."""
    generator = torch.Generator().manual_seed(seed)
    slots = draw.randint(1, 70)
    new = lambda length: torch.rand(2, 1, length, generator=generator)
    kind = draw.choice(["even", "spiky", "zero", "some nan", "ties"])
    usage = {"even": new(slots), "zero": new(slots) * 0, "ties": new(slots) * 0 + 1}.get(kind, new(slots) ** 9)
    if kind == "some nan":
        usage[new(slots) < 0.2] = float("nan")
    scores = (new(slots) * 8 - 4).round()
    scores[new(slots) < 0.1], scores[new(slots) < 0.05] = float("nan"), -float("inf")
    known = draw.randint(0, slots)
    credit = new(known) if known else None
    keep = torch.tensor([draw.randint(1, slots + 3) for _ in range(2)])
    valid = None if draw.random() < 0.4 else new(slots) < draw.choice([0.3, 0.8])
    return scores, usage, keep, credit, valid


@pytest.mark.parametrize("seed", range(6))
def test_triton_equals_the_torch_path_whatever_the_rules(seed, run_triton, assert_same_plan):
    draw = random.Random(seed)
    rules, (scores, usage, keep, credit, valid) = any_rules(draw), any_layer(draw, seed)
    options = (usage, credit, keep, int(keep.min()), valid, rules)
    expected = segment_plan(*options)
    assert_same_plan(run_triton(segment_plan, *options).result, expected)
    width = min(int(keep.max()), usage.shape[-1])
    limits = (expected.slot_edges, expected.quotas, expected.num_first, expected.first_recent)
    arguments = (scores, *limits, valid, rules.must_keep, width)
    assert torch.equal(run_triton(segment_select, *arguments).result, segment_select(*arguments))
