"""Metrics against float64 and loops written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstitch.evaluation.metrics import (
    NonFiniteLogits,
    TokenComparison,
    compare_tokens,
    retained_iou,
    summarise,
    token_nll,
    wiped_regions,
)


def random_logits(rows, words, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, words, generator=generator) * 4 for _ in range(2))


# 64 rows are one block: one block, a full and a broken one, none at all.
@pytest.mark.parametrize("rows", [1, 64, 150, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparison_against_float64(rows, dtype):
    dense, pressed = (logits.to(dtype) for logits in random_logits(rows, 301, seed=rows))
    targets = torch.arange(rows) * 7 % 301
    found = compare_tokens(dense, pressed, targets)
    log_dense, log_pressed = (logits.double().log_softmax(-1) for logits in (dense, pressed))
    assert found.kl.shape == (rows,)
    torch.testing.assert_close(
        found.kl.double(), (log_dense.exp() * (log_dense - log_pressed)).sum(-1), atol=2e-5, rtol=1e-5
    )
    picked = torch.arange(rows), targets
    torch.testing.assert_close(found.nll.double(), -log_pressed[picked], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.dense_nll.double(), -log_dense[picked], atol=2e-5, rtol=1e-5)
    assert found.agreement.tolist() == (dense.argmax(-1) == pressed.argmax(-1)).float().tolist()
    torch.testing.assert_close(token_nll(dense, targets), found.dense_nll)


def test_equal_logits_have_no_divergence():
    dense, _ = random_logits(70, 50, seed=3)
    found = compare_tokens(dense, dense.clone(), torch.zeros(70, dtype=torch.int64))
    assert found.kl.tolist() == [0.0] * 70 and found.agreement.mean() == 1 and torch.equal(found.nll, found.dense_nll)


def test_a_word_that_both_rule_out_counts_nothing():
    dense = torch.tensor([[0.0, 1.0, -math.inf]])
    pressed = torch.tensor([[0.5, 0.5, -math.inf]])
    p = torch.tensor([0.0, 1.0]).double().softmax(-1)
    expected = float((p * (p / 0.5).log()).sum())
    assert compare_tokens(dense, pressed, torch.tensor([1])).kl.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("side", ["dense", "pressed"])
def test_nan_is_refused_and_named(side):
    logits = dict(zip(("dense", "pressed"), random_logits(3, 11, seed=0)))
    logits[side][1, 4] = math.nan
    with pytest.raises(NonFiniteLogits, match=side):
        compare_tokens(logits["dense"], logits["pressed"], torch.tensor([0, 1, 2]))
    if side == "dense":
        with pytest.raises(NonFiniteLogits, match="dense"):
            token_nll(logits["dense"], torch.tensor([0, 1, 2]))


def test_parts_join_in_order():
    parts = [TokenComparison(*(torch.full((count,), float(count)) for _ in range(4))) for count in (2, 1)]
    assert TokenComparison.join(parts).kl.tolist() == [2, 2, 1] and TokenComparison.join([]).kl.numel() == 0


position_sets = st.lists(st.integers(0, 199), min_size=1, max_size=40, unique=True)


def padded(sets):
    width = max(len(s) for s in sets)
    return torch.tensor([[sorted(s) + [-1] * (width - len(s)) for s in sets]])


@settings(max_examples=60, deadline=None)
@given(st.lists(position_sets, min_size=1, max_size=3), st.integers(200, 230), st.integers(1, 70))
def test_wiped_regions_against_a_loop(sets, seen, region):
    starts = range(0, seen, region)
    expected = [sum(not any(s <= p < s + region for p in kept) for s in starts) / len(starts) for kept in sets]
    assert wiped_regions(padded(sets), seen, region)[0].tolist() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(position_sets, position_sets), min_size=1, max_size=3))
def test_retained_iou_against_sets(pairs):
    before, after = padded([b for b, _ in pairs]), padded([a for _, a in pairs])
    expected = [len(set(b) & set(a)) / len(set(b) | set(a)) for b, a in pairs]
    assert retained_iou(before, after, 200)[0].tolist() == pytest.approx(expected)


def test_summary_counts_only_what_has_a_value():
    assert summarise([1.0, None, 3.0]) == {"n": 2, "mean": 2.0, "std": pytest.approx(math.sqrt(2))}
    assert summarise([True]) == {"n": 1, "mean": 1.0, "std": None}
    assert summarise([None]) == {"n": 0, "mean": None, "std": None}
