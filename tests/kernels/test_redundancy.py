import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvstitch.kernels.redundancy import blocked
from kvstitch.kernels.redundancy.api import key_redundancy
from kvstitch.kernels.redundancy.reference import redundancy_reference

GOLDEN = torch.tensor([[[0.2611, 0.2138, 0.1750, 0.1750, 0.1750]]])


def random_case(slots, seed=0, heads=2, dims=16, keep=0.7):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, heads, slots, dims, generator=generator) + torch.randn(2, heads, 1, dims, generator=generator)
    members = torch.rand(2, heads, slots, generator=generator) < keep
    return keys, members


@pytest.mark.parametrize("impl", ["auto", "blocked", "reference"])
def test_golden_vector(impl):
    keys = torch.eye(3)[[0, 0, 1, 0, 2]][None, None]
    actual = key_redundancy(keys, torch.ones(1, 1, 5, dtype=torch.bool), 0.5, impl=impl)
    torch.testing.assert_close(actual, GOLDEN, rtol=0, atol=5e-5)


@pytest.mark.parametrize("slots", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9])
def test_blocks_agree_with_the_whole_matrix_in_float64(slots, threshold, monkeypatch):
    monkeypatch.setattr(blocked, "_BLOCK_ELEMENTS", {"cpu": 1})
    keys, members = random_case(slots)
    expected = redundancy_reference(keys.double(), members, threshold)
    # A cosine may lie on the other side of the threshold after rounding; none of these does.
    actual = key_redundancy(keys, members, threshold, impl="blocked")
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-8)


def test_no_element_decides_the_size_of_blocks(monkeypatch):
    keys, members = random_case(150)
    one = key_redundancy(keys, members, 0.5)
    monkeypatch.setattr(blocked, "_LEAST_ROWS", 7)
    monkeypatch.setattr(blocked, "_BLOCK_ELEMENTS", {"cpu": 1})
    torch.testing.assert_close(key_redundancy(keys, members, 0.5), one)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_the_similarity_matrix_never_exists():
    slots = 3000
    keys, members = torch.randn(1, 2, slots, 8), torch.ones(1, 2, slots, dtype=torch.bool)
    with LargestTensor() as largest:
        key_redundancy(keys, members, 0.5)
    assert largest.elements <= 2 * 64 * slots < 2 * slots**2 / 40


def test_others_than_members_do_not_exist():
    keys, members = random_case(50)
    members[:, :] = members[:1, :1]
    places = members[0, 0]
    garbage = torch.where(members[..., None], keys, float("nan"))
    actual = key_redundancy(garbage, members, 0.5)
    alone = key_redundancy(keys[:, :, places], torch.ones_like(members[:, :, places]), 0.5)
    torch.testing.assert_close(actual[:, :, places], alone)
    assert (actual[:, :, ~places] == 0).all()
    torch.testing.assert_close(actual.sum(-1), torch.ones(2, 2))


def test_a_head_without_members():
    keys, members = random_case(20)
    members[0, 1] = False
    for impl in ("blocked", "reference"):
        actual = key_redundancy(keys, members, 0.5, impl=impl)
        assert actual.isfinite().all() and (actual[0, 1] == 0).all()


@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_keys_of_zeros_are_like_none_and_not_like_themselves(impl):
    keys = torch.zeros(1, 1, 4, 8)
    keys[0, 0, 1, 0] = keys[0, 0, 2, 1] = 3.0
    actual = key_redundancy(keys, torch.ones(1, 1, 4, dtype=torch.bool), 0.5, impl=impl)
    torch.testing.assert_close(actual, torch.full((1, 1, 4), 0.25))


def test_low_precision_is_computed_in_float32():
    keys, members = random_case(80)
    low = keys.bfloat16()
    torch.testing.assert_close(key_redundancy(low, members, 0.5), key_redundancy(low.float(), members, 0.5))


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
def test_bad_threshold(threshold):
    keys, members = random_case(4)
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\)"):
        key_redundancy(keys, members, threshold)


def test_bad_implementation():
    keys, members = random_case(4)
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'blocked', 'reference', got 'triton'"):
        key_redundancy(keys, members, 0.5, impl="triton")
