import torch

from kvstitch.scorers import StreamingLLM
from kvstitch.views import Needs


def test_by_hand(make_story):
    story = make_story(lengths=(7,), num_kv_heads=1)
    story.kept[:] = torch.tensor([True, False, True, False, True, True, True])
    torch.testing.assert_close(StreamingLLM().score(story.view()), torch.tensor([[[-7.0, -5.0, -3.0, -2.0, -1.0]]]))


def test_sinks_and_most_recent_survive_three_events(make_story):
    """A top-k behind protected sinks, event after event, is StreamingLLM."""
    sinks, budget = 4, 10
    story = make_story(lengths=(40,), keep=0.0)
    story.kept[:] = False
    for seen in (20, 30, 40):
        story.lengths[0] = seen
        story.kept[:, :, seen - 10 : seen] = True
        if seen == 20:
            story.kept[:, :, :20] = True
        view = story.view()
        scores = StreamingLLM().score(view).masked_fill(view.positions < sinks, float("inf"))
        winners = view.positions.gather(2, scores.topk(budget, dim=-1).indices).sort(-1).values
        story.kept = torch.zeros_like(story.kept).scatter(2, winners, True)
        expected = [0, 1, 2, 3, *range(seen - 6, seen)]
        assert winners.tolist() == [[expected, expected]]


def test_ages_are_exact_far_out(make_view):
    view = make_view([[0.0, 0.0]] * 3)
    far = 2**24 + 1
    view.positions.add_(far)
    view.next_position.add_(far)
    assert StreamingLLM().score(view).tolist() == [[[-3.0, -2.0, -1.0]]]


def test_needs_nothing():
    assert StreamingLLM().needs == Needs()
