import math

import pytest
import torch

from kvstitch.scorers import KeyDiff
from kvstitch.views import Needs


@pytest.mark.parametrize("compact", [True, False])
def test_formula(make_story, assert_scores, compact):
    story = make_story(lengths=(29, 17))
    view = story.view(compact=compact)
    keys = story.turned(story.keys)

    def reference(b, h):
        kept = [keys[b, h, p] for p in story.kept_places(b, h)]
        anchor = sum(key / key.norm() for key in kept) / len(kept)
        return [-float(key @ anchor) / float(key.norm() * anchor.norm()) for key in kept]

    assert_scores(KeyDiff().score(view), story, view, reference)


def test_by_hand(make_view):
    # The anchor points along (2, 1).
    scores = KeyDiff().score(make_view([[5, 0], [1, 0], [0, 3]]))
    torch.testing.assert_close(scores, -torch.tensor([[[2, 2, 1]]]) / math.sqrt(5))


def test_a_single_key_is_its_own_anchor(make_view):
    torch.testing.assert_close(KeyDiff().score(make_view([[3.0, 4.0]])), torch.tensor([[[-1.0]]]))


def test_a_key_of_zeros_points_nowhere(make_view):
    torch.testing.assert_close(KeyDiff().score(make_view([[0, 0], [0, 2]])), torch.tensor([[[0.0, -1.0]]]))


def test_needs_nothing():
    assert KeyDiff().needs == Needs()
