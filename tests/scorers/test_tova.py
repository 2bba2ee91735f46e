import math

import pytest
import torch

from kvstitch.scorers import TOVA
from kvstitch.views import Needs


def attention_by_loops(story, share):
    """For each row and kv head: {position: attention of the newest query, averaged over query heads}."""
    turned_queries, turned_keys = story.turned(story.queries), story.turned(story.keys)
    batch, num_heads = story.queries.shape[:2]
    num_kv_heads = story.keys.shape[1]
    group = num_heads // num_kv_heads

    def paid(b, q):
        h = q // group
        newest = turned_queries[b, q, story.lengths[b] - 1]
        weights = {p: math.exp(story.scaling * float(newest @ turned_keys[b, h, p])) for p in story.kept_places(b, h)}
        total = sum(weights.values())
        return {p: weight / total for p, weight in weights.items()}

    def reference(b, h):
        heads = range(num_heads) if share == "layer" else range(h * group, (h + 1) * group)
        every = [paid(b, q) for q in heads]
        return [sum(one.get(p, 0.0) for one in every) / len(every) for p in story.kept_places(b, h)]

    return reference


@pytest.mark.parametrize("share", ["layer", "group"])
@pytest.mark.parametrize("compact", [True, False])
def test_formula(make_story, assert_scores, share, compact):
    story = make_story(lengths=(29, 17), num_kv_heads=3, group=2)
    view = story.view(compact=compact)
    assert_scores(TOVA(share=share).score(view), story, view, attention_by_loops(story, share))


def test_by_hand(make_view):
    keys = [[1, 0], [0, 1], [0, 0]]
    view = make_view(keys, queries=[[[math.log(2), 0]], [[0, math.log(3)]]], query_positions=[2])
    # Head 0 pays (2, 1, 1) / 4, head 1 (1, 3, 1) / 5.
    torch.testing.assert_close(TOVA().score(view), torch.tensor([[[0.35, 0.425, 0.225]]]))


def test_heads_with_the_same_tokens_rank_alike(make_story):
    view = make_story(num_kv_heads=3, alike=True).view()
    scores = TOVA().score(view)
    assert torch.equal(scores[:, 0], scores[:, 1]) and torch.equal(scores[:, 0], scores[:, 2])
    torch.testing.assert_close(scores.sum(-1), torch.ones(1, 3))


def test_the_newest_of_many_queries_decides(make_story):
    story = make_story()
    torch.testing.assert_close(TOVA().score(story.view(window=20)), TOVA().score(story.view(window=1)))


def test_needs_one_query():
    assert TOVA().needs == Needs(queries=1)


def test_unknown_share():
    with pytest.raises(ValueError, match="share must be one of 'layer', 'group', got 'grup'; did you mean 'group'"):
        TOVA(share="grup")
