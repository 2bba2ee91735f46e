from dataclasses import replace

import pytest
import torch

from kvstitch.scorers import Random
from kvstitch.views import Needs


def lowbias32(x):
    """The hash in Python's unbounded integers."""
    x %= 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7])
def test_formula(make_story, assert_scores, seed):
    story = make_story(lengths=(29, 17))
    view = story.view()

    def reference(b, h):
        key = lowbias32(lowbias32(seed % 2**32) ^ (seed >> 32) ^ view.layer_idx)
        return [lowbias32(p ^ key) // 256 / 2**24 for p in story.kept_places(b, h)]

    assert_scores(Random(seed=seed).score(view), story, view, reference)


def test_hash_is_the_published_one():
    # Zero is its fixed point, and a bijection has no two words in one place.
    assert lowbias32(0) == 0
    assert len({lowbias32(x) for x in range(5000)}) == 5000


def test_numbers_are_uniform_and_differ_by_layer_and_seed(make_view):
    view = make_view([[0.0, 0.0]] * 20_000)
    one = Random().score(view).flatten()
    assert one.min() >= 0 and one.max() < 1
    counts = torch.histc(one, bins=20, min=0, max=1)
    # 1000 a bin, deviation 31.
    assert (counts - 1000).abs().max() < 140
    for other in (Random(seed=1).score(view), Random().score(replace(view, layer_idx=1))):
        assert torch.corrcoef(torch.stack((one, other.flatten())))[0, 1].abs() < 0.03
    assert torch.corrcoef(torch.stack((one[:-1], one[1:])))[0, 1].abs() < 0.03


def test_no_generator_is_touched(make_view):
    before = torch.get_rng_state()
    Random().score(make_view([[0.0, 0.0]]))
    assert torch.equal(before, torch.get_rng_state())


def test_needs_nothing():
    assert Random().needs == Needs()


def test_negative_seed():
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        Random(seed=-1)
