import math

import pytest
import torch

from kvstitch.scorers import ExpectedAttention
from kvstitch.views import Needs, Rotary


def average_rotation(story, start, count):
    """Mean RoPE matrix over positions start ... start + count - 1, column by column."""
    dims = story.keys.shape[-1]
    basis = torch.eye(dims, dtype=torch.float64)[:, None].expand(-1, count, -1)
    return story.turned(basis, shift=start).mean(dim=1).T


def expected_by_loops(story, scorer):
    keys = story.turned(story.keys)
    group = story.queries.shape[1] // story.keys.shape[1]
    c, sinks = story.scaling, scorer.num_sinks

    def reference(b, h):
        length, places = story.lengths[b], story.kept_places(b, h)
        rotation = average_rotation(story, length, scorer.num_future_positions)
        total = {p: 0.0 for p in places}
        for q in range(h * group, (h + 1) * group):
            used = [w for w in range(max(0, length - scorer.window_size), length) if w >= sinks]
            queries = [rotation @ story.queries[b, q, w] for w in used]
            mean = sum(queries) / len(queries)
            covariance = sum(torch.outer(x - mean, x - mean) for x in queries) / len(queries)
            logit = {}
            for p in places:
                key = keys[b, h, p]
                logit[p] = c * float(key @ mean)
                if scorer.use_covariance:
                    logit[p] += c * c / 2 * float(key @ covariance @ key)
            everyone = sum(math.exp(z) for z in logit.values())
            others = sum(math.exp(z) for p, z in logit.items() if p >= sinks)
            for p in places:
                total[p] += math.exp(logit[p]) / (everyone if p < sinks else others) / group
        if scorer.use_value_norm:
            return [(total[p] + scorer.epsilon) * float(story.values[b, h, p].norm()) for p in places]
        return [total[p] for p in places]

    return reference


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon": 0.01, "window_size": 9},
        {"use_covariance": False, "num_sinks": 0},
        {"use_value_norm": False, "epsilon": 0.5, "num_future_positions": 1},
    ],
)
@pytest.mark.parametrize(
    "rope",
    [{}, {"interleaved": True}, {"rotated_dims": 4, "attention_scaling": 1.3}],
    ids=["half", "interleaved", "partial"],
)
def test_formula(make_story, assert_scores, options, rope):
    story = make_story(lengths=(29, 17), **rope)
    scorer = ExpectedAttention(**{"num_future_positions": 20, "window_size": 16, **options})
    view = story.view(window=16)
    assert_scores(scorer.score(view), story, view, expected_by_loops(story, scorer))


def test_by_hand(make_view):
    # No rotation. Queries (1, 0) and (3, 0): mean (2, 0), covariance 1 along the first dim. Logits 0 and 2 + 1/2.
    view = make_view(
        keys=[[0, 0], [1, 0]],
        values=[[3, 4], [0, 1]],
        queries=[[[1, 0], [3, 0]]],
        query_positions=[0, 1],
        rotary=Rotary(torch.zeros(1, dtype=torch.float64)),
    )
    share = 1 / (1 + math.exp(2.5))
    scores = ExpectedAttention(num_sinks=0, epsilon=0.1).score(view)
    torch.testing.assert_close(scores, torch.tensor([[[(share + 0.1) * 5, 1 - share + 0.1]]]))


def test_every_query_is_taken_back_from_its_own_position(make_story):
    """One and the same query asked at every position has no covariance; at wrong positions it would seem to have some."""
    story = make_story(lengths=(29,))
    story.queries = story.queries[:, :, :1].expand_as(story.queries).clone()
    view = story.view()
    torch.testing.assert_close(
        ExpectedAttention(use_covariance=True).score(view), ExpectedAttention(use_covariance=False).score(view)
    )


def test_the_future_starts_at_the_next_position(make_story):
    """One future position: the keys are scored by the attention of the mean query asked there."""
    story = make_story(lengths=(29,), keep=1.0, num_kv_heads=1, group=1)
    scorer = ExpectedAttention(num_future_positions=1, num_sinks=0, use_covariance=False, use_value_norm=False)
    mean = story.queries[0, 0].mean(dim=0, keepdim=True)
    query = story.turned(mean, shift=29)[0]
    expected = (story.scaling * story.turned(story.keys)[0, 0] @ query).softmax(dim=0)
    torch.testing.assert_close(scorer.score(story.view(window=29))[0, 0].double(), expected, rtol=1e-4, atol=1e-6)


def test_many_slots_are_scored_in_blocks(make_story, monkeypatch):
    view = make_story(lengths=(29,)).view()
    whole = ExpectedAttention().score(view)
    monkeypatch.setattr("kvstitch.scorers.expected_attention._SLOT_BLOCK", 5)
    torch.testing.assert_close(ExpectedAttention().score(view), whole)


def test_a_row_of_sinks_only(make_story):
    view = make_story(lengths=(3,)).view()
    scores = ExpectedAttention(epsilon=0.0).score(view)
    # No query to fit, so the softmax over the sinks is even.
    torch.testing.assert_close(scores, torch.linalg.vector_norm(view.values, dim=-1) / 3)


def test_needs_queries_and_rope():
    assert ExpectedAttention(window_size=99).needs == Needs(queries=99, rotary=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_future_positions": 0}, "num_future_positions must be at least 1"),
        ({"num_sinks": -1}, "num_sinks must be at least 0"),
        ({"epsilon": -0.1}, "epsilon must be in"),
        ({"window_size": 0}, "window_size must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ExpectedAttention(**options)
