"""The kernels of mass segments against the torch path, with rules drawn at random and on later events of golden cases."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstitch.kernels.segment_quota.api import segment_plan, segment_select
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.kernels.segment_quota.workload import REFERENCE_RULES

GOLDEN = Path(__file__).parent.parent / "golden"


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


@pytest.mark.parametrize("number", [20, 35])
def test_triton_replays_the_second_events_of_the_public_code(number, run_triton):
    """With the credit of the first; one head of a golden case with another seed, one without any evidence."""
    case = next(case for case in json.loads((GOLDEN / "ams_reference.json").read_text()) if case["case"] == number)
    arrays = np.load(GOLDEN / "ams_reference.npz")
    head = lambda event, name: torch.from_numpy(arrays[f"c{number}_e{event}_{name}"])[:, :1]
    given = case["params"]
    rules = replace(
        REFERENCE_RULES,
        segment_mass=given["segment_mass"],
        min_segment_tokens=given["min_seg_len"],
        max_segment_tokens=given["max_seg_len"],
        min_keep_tokens=given["min_keep_per_segment"],
        num_sinks=given["n_sink"],
        num_recent=given["always_keep_last"],
        credit=given["use_credit"],
        credit_decay=given["credit_decay"],
        credit_mix=given["mix_beta"],
    )
    keep = torch.tensor([case["keep"]])
    options = (head(1, "usage"), head(0, "credit"), keep, case["keep"], None, rules)
    plan = run_triton(segment_plan, *options).result
    quotas = case["events"][1]["quotas"][0]
    assert plan.quotas[0, 0, : len(quotas)].tolist() == quotas
    limits = (plan.slot_edges, plan.quotas, plan.num_first, plan.first_recent)
    found = run_triton(segment_select, head(1, "scores"), *limits, None, "after", case["keep"]).result
    assert torch.equal(found, head(1, "indices"))
