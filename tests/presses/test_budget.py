from fractions import Fraction

import numpy as np
import pytest
import torch

from kvstitch.presses import Budget, EvictionPress


@pytest.mark.parametrize(
    "value, expected",
    [
        (256, Budget(tokens=256)),
        (np.int64(256), Budget(tokens=256)),
        (0.25, Budget(fraction=0.25)),
        (1.0, Budget(fraction=1.0)),
        ("64MiB", Budget(bytes=64 * 2**20)),
        ("1.5 kb", Budget(bytes=1500)),
    ],
)
def test_short_forms(value, expected):
    assert Budget.of(value) == expected
    assert Budget.of(expected) is expected


@pytest.mark.parametrize("value", [0, -1, 0.0, -0.5, 1.5, float("nan")])
def test_impossible_values(value):
    with pytest.raises(ValueError, match=f"budget.*{value!r}".replace("[", r"\[")):
        Budget.of(value)


@pytest.mark.parametrize("value", [True, None, "256", "many", [256], "5 furlongs"])
def test_wrong_types(value):
    with pytest.raises(TypeError, match="tokens .256., a kept fraction"):
        Budget.of(value)


def test_a_float_that_meant_tokens_is_told_so():
    with pytest.raises(ValueError, match="write 256 for tokens"):
        Budget.of(256.0)


def test_exactly_one_kind():
    with pytest.raises(ValueError, match="exactly one"):
        Budget(tokens=3, fraction=0.5)
    with pytest.raises(ValueError, match="exactly one"):
        Budget()


def test_fractions_are_exact_and_per_row():
    seen = torch.tensor([30, 10, 7, 3, 1000])
    # In binary floating point 0.1 * 30 is 3.0000000000000004 and 0.29 * 1000 is 289.99999999999994.
    assert Budget(fraction=0.1).slots(seen, 1, least=1).tolist() == [3, 1, 1, 1, 100]
    assert Budget(fraction=0.29).slots(seen, 1, least=2).tolist() == [8, 2, 2, 2, 290]
    assert Budget(fraction=1.0).slots(seen, 1, least=1).tolist() == seen.tolist()


@pytest.mark.parametrize("fraction", [1 / 3, 2 / 3, 512 / 3000, 0.7071067811865476])
def test_long_decimals_of_long_texts_stay_exact(fraction):
    seen = [100, 3000, 32768, 2**20, 2**40]
    expected = [int(Fraction(str(fraction)) * tokens) for tokens in seen]
    assert Budget(fraction=fraction).slots(torch.tensor(seen), 1, least=5).tolist() == expected


def test_bytes_round_down_and_have_a_floor():
    seen = torch.tensor([100, 50])
    assert Budget(bytes=1000).slots(seen, 64, least=5).tolist() == [15, 15]
    with pytest.raises(ValueError, match="buys 15 slots.*at least 1024"):
        Budget(bytes=1000).slots(seen, 64, least=16)


def test_press_refuses_a_budget_that_cannot_hold_the_sinks(key_hash, shaped_topk):
    with pytest.raises(ValueError, match="at least 5 tokens, got 4"):
        EvictionPress(key_hash, shaped_topk(num_sinks=4), budget=4)
    EvictionPress(key_hash, shaped_topk(num_sinks=4), budget=5)


@pytest.mark.parametrize("interval", [0, -3, 2.5, True])
def test_press_refuses_impossible_intervals(key_hash, shaped_topk, interval):
    with pytest.raises(ValueError, match="interval"):
        EvictionPress(key_hash, shaped_topk(), budget=20, interval=interval)


def test_press_tells_a_class_from_an_instance(key_hash, shaped_topk):
    with pytest.raises(TypeError, match=r"write ShapedTopK\(\)"):
        EvictionPress(key_hash, shaped_topk, budget=20)
    with pytest.raises(TypeError, match="`scorer` must be a Scorer"):
        EvictionPress("tova", shaped_topk(), budget=20)
