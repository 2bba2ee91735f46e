import math

import pytest
import torch

from kvstitch.scorers import SnapKV
from kvstitch.views import Needs


def pooled_attention_by_loops(story, window, kernel, edges):
    turned_queries, turned_keys = story.turned(story.queries), story.turned(story.keys)
    group = story.queries.shape[1] // story.keys.shape[1]

    def reference(b, h):
        places, length = story.kept_places(b, h), story.lengths[b]
        usage = {p: 0.0 for p in places}
        for q in range(h * group, (h + 1) * group):
            for w in range(max(0, length - window), length):
                seen = [p for p in places if p <= w]
                weights = [
                    math.exp(story.scaling * float(turned_queries[b, q, w] @ turned_keys[b, h, p])) for p in seen
                ]
                for p, weight in zip(seen, weights, strict=True):
                    watchers = sum(1 for x in range(max(0, length - window), length) if x >= p)
                    usage[p] += weight / sum(weights) / watchers / group
        u = [usage[p] for p in places]
        pooled = []
        for i in range(len(u)):
            taps = u[max(0, i - kernel // 2) : i + kernel // 2 + 1]
            pooled.append(sum(taps) / (len(taps) if edges == "valid" else kernel))
        return pooled

    return reference


@pytest.mark.parametrize("edges", ["valid", "zero"])
@pytest.mark.parametrize("window, kernel", [(6, 5), (40, 3), (1, 1)])
@pytest.mark.parametrize("compact", [True, False])
def test_formula(make_story, assert_scores, window, kernel, edges, compact):
    story = make_story(lengths=(29, 9))
    view = story.view(window=window, compact=compact)
    scores = SnapKV(window_size=window, kernel_size=kernel, edges=edges).score(view)
    assert_scores(scores, story, view, pooled_attention_by_loops(story, window, kernel, edges))


@pytest.mark.parametrize("edges, expected", [("valid", [5 / 12, 7 / 18, 3 / 8]), ("zero", [5 / 18, 7 / 18, 1 / 4])])
def test_by_hand(make_view, edges, expected):
    # Queries of zeros at positions 1 and 2 attend evenly: 1/2, 1/2, - and 1/3, 1/3, 1/3, so the usage is 5/12, 5/12, 1/3.
    view = make_view([[1, 0], [0, 1], [1, 1]], queries=[[[0, 0], [0, 0]]], query_positions=[1, 2])
    scores = SnapKV(window_size=2, kernel_size=3, edges=edges).score(view)
    torch.testing.assert_close(scores, torch.tensor([[expected]]))


def test_needs_its_window():
    assert SnapKV(window_size=32).needs == Needs(queries=32)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window_size": 0}, "window_size must be at least 1, got 0"),
        ({"kernel_size": 4}, "kernel_size must be odd, got 4; the nearest valid value is 5"),
        ({"edges": "zeros"}, "did you mean 'zero'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        SnapKV(**options)
