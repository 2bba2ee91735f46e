import math

import pytest
import torch

from kvstitch.scorers import RKV
from kvstitch.views import Needs


def redundancy_by_loops(keys, threshold):
    """r of a list of keys, after the text of the method."""
    count = len(keys)
    similarity = [
        [float(x @ y) / float(x.norm() * y.norm()) if i != j else 0.0 for j, y in enumerate(keys)]
        for i, x in enumerate(keys)
    ]
    for row in similarity:
        similar = [j for j in range(count) if row[j] > threshold]
        if similar:
            row[similar[-1]] = 0.0
    weights = [math.exp(sum(row[j] for row in similarity) / count) for j in range(count)]
    return [weight / sum(weights) for weight in weights]


def rkv_by_loops(story, scorer):
    queries, keys = story.turned(story.queries), story.turned(story.keys)
    group = story.queries.shape[1] // story.keys.shape[1]

    def shares(logits, history):
        """Softmax over the history; what is newer gets its weight on the same scale, at most 1."""
        whole = sum(math.exp(logits[p]) for p in history)
        return {p: 1.0 if not history else min(1.0, math.exp(z) / whole) for p, z in logits.items()}

    def reference(b, h):
        length, places = story.lengths[b], story.kept_places(b, h)
        window = range(max(0, length - scorer.window_size), length)
        history = [p for p in places if p < window[0]]
        total, watchers = {p: 0.0 for p in places}, {p: 0 for p in places}
        for w in window:
            seen = [p for p in places if p <= w]
            by_head = [
                {p: story.scaling * float(queries[b, q, w] @ keys[b, h, p]) for p in seen}
                for q in range(h * group, (h + 1) * group)
            ]
            if scorer.gqa == "max_logit":
                by_head = [{p: max(one[p] for one in by_head) for p in seen}]
            for one in by_head:
                for p, share in shares(one, history).items():
                    total[p] += share / len(by_head)
            for p in seen:
                watchers[p] += 1
        importance = {p: total[p] / watchers[p] for p in places}
        half = scorer.kernel_size // 2
        pooled = {
            p: max(importance[x] for x in history[max(0, i - half) : i + half + 1]) for i, p in enumerate(history)
        }
        importance.update(pooled)

        members = places if scorer.sim_scope == "all" else history
        r = dict.fromkeys(places, 0.0)
        if members:
            r.update(zip(members, redundancy_by_loops([keys[b, h, p] for p in members], scorer.similarity_threshold)))
        return [scorer.mix_lambda * importance[p] - (1 - scorer.mix_lambda) * r[p] for p in places]

    return reference


@pytest.mark.parametrize("gqa", ["max_logit", "mean_prob"])
@pytest.mark.parametrize("sim_scope", ["all", "history"])
@pytest.mark.parametrize("compact", [True, False])
def test_formula(make_story, assert_scores, gqa, sim_scope, compact):
    story = make_story(lengths=(29, 17, 5))
    scorer = RKV(gqa=gqa, sim_scope=sim_scope, window_size=6, mix_lambda=0.3)
    view = story.view(compact=compact)
    assert_scores(scorer.score(view), story, view, rkv_by_loops(story, scorer))


@pytest.mark.parametrize("options", [{}, {"kernel_size": 1, "similarity_threshold": 0.0}, {"mix_lambda": 1.0}])
def test_formula_with_other_options(make_story, assert_scores, options):
    story = make_story(lengths=(29,))
    scorer = RKV(**options)
    view = story.view()
    assert_scores(scorer.score(view), story, view, rkv_by_loops(story, scorer))


def test_by_hand(make_view):
    # A query of zeros at the last position: the history of four gets 1/4 each, the newest exp(0) / 4 as well. The
    # redundancy is the golden vector of e0, e0, e1, e0, e2: column means .4, .2, 0, 0, 0 under a softmax.
    keys = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
    view = make_view(keys, queries=[[[0, 0, 0]]], query_positions=[4])
    redundancy = torch.tensor([0.2611, 0.2138, 0.1750, 0.1750, 0.1750])
    scores = RKV(window_size=1, mix_lambda=0.1).score(view)
    torch.testing.assert_close(scores[0, 0], 0.1 * 0.25 - 0.9 * redundancy, rtol=0, atol=5e-5)


def test_no_history_is_all_important(make_view):
    view = make_view([[1.0, 0.0]] * 3, queries=[[[1.0, 0.0]] * 3], query_positions=[0, 1, 2])
    torch.testing.assert_close(RKV(mix_lambda=1.0).score(view), torch.ones(1, 1, 3))


def test_needs_its_window():
    assert RKV(window_size=5).needs == Needs(queries=5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mix_lambda": 1.1}, r"mix_lambda must be in \[0, 1\], got 1.1"),
        ({"similarity_threshold": 1.0}, r"similarity_threshold must be in \[0, 1\), got 1.0"),
        ({"kernel_size": 2}, "kernel_size must be odd"),
        ({"window_size": 0}, "window_size must be at least 1"),
        ({"gqa": "max_logits"}, "did you mean 'max_logit'"),
        ({"sim_scope": "past"}, "sim_scope must be one of 'all', 'history', got 'past'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        RKV(**options)
