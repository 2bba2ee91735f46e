import pytest
import torch

from kvstitch.scorers import KeyNorm
from kvstitch.views import Needs


@pytest.mark.parametrize("compact", [True, False])
def test_formula(make_story, assert_scores, compact):
    story = make_story(lengths=(29, 17))
    view = story.view(compact=compact)

    def reference(b, h):
        return [-float((story.keys[b, h, p] ** 2).sum().sqrt()) for p in story.kept_places(b, h)]

    assert_scores(KeyNorm().score(view), story, view, reference)


def test_by_hand(make_view):
    torch.testing.assert_close(
        KeyNorm().score(make_view([[3, 4], [0, 0], [0, 1]])), torch.tensor([[[-5.0, -0.0, -1.0]]])
    )


def test_needs_nothing():
    assert KeyNorm().needs == Needs()
