"""What every scorer owes: positions, rows, heads, padding and dtypes."""

from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import kvstitch.configs
from kvstitch.scorers import (
    RKV,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    KVPressScorer,
    Random,
    SnapKV,
    StreamingLLM,
    TriAttention,
)
from kvstitch.views import QueryWindow

CONFIGS = Path(kvstitch.configs.__file__).parent / "scorer"
SCORERS = {
    "tova": TOVA(),
    "tova_group": TOVA(share="group"),
    "snapkv": SnapKV(window_size=6),
    "snapkv_zero_edges": SnapKV(window_size=6, kernel_size=3, edges="zero"),
    "expected_attention": ExpectedAttention(num_future_positions=16, window_size=12),
    "expected_attention_plain": ExpectedAttention(use_covariance=False, use_value_norm=False, window_size=12),
    "keydiff": KeyDiff(),
    "rkv": RKV(window_size=4),
    "rkv_port": RKV(window_size=4, gqa="mean_prob", sim_scope="history", mix_lambda=0.07),
    "triattention": TriAttention(),
    "triattention_max": TriAttention(aggregate="max", gqa="mean", offset_max=64, debias=False),
    "streaming_llm": StreamingLLM(),
    "keynorm": KeyNorm(),
    "random": Random(seed=5),
}
# kvpress pins older transformers, so it is not everywhere.
if find_spec("kvpress"):
    import kvpress

    SCORERS["kvpress_snapkv"] = KVPressScorer(kvpress.SnapKVPress(window_size=4))
    SCORERS["kvpress_expected_attention"] = KVPressScorer(kvpress.ExpectedAttentionPress(), window_size=12)
everywhere = pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)


def test_no_scorer_that_can_be_chosen_is_missing_here():
    """A new file in configs/ must bring its scorer under these laws; kvpress's are in test_kvpress_scorer.py."""
    chosen = {OmegaConf.load(file)["_target_"].rpartition(".")[2] for file in CONFIGS.glob("*.yaml")}
    here = {type(scorer).__name__ for scorer in SCORERS.values()}
    assert len(chosen) > 5 and chosen - {"KVPressScorer"} == here - {"KVPressScorer"}


def in_order(scores, view):
    """Scores of the valid slots of each row and head, in order of position."""
    return [[scores[b, h][view.valid[b, h]] for h in range(scores.shape[1])] for b in range(scores.shape[0])]


def assert_alike(one, other, **tolerance):
    for row, other_row in zip(one, other, strict=True):
        for head, other_head in zip(row, other_row, strict=True):
            torch.testing.assert_close(head, other_head, **tolerance)


def tensors_of(record):
    """Every tensor of a dataclass and of the dataclasses in it."""
    values = [getattr(record, field.name) for field in fields(record)]
    inner = [tensor for value in values if is_dataclass(value) for tensor in tensors_of(value)]
    return inner + [value for value in values if isinstance(value, torch.Tensor)]


@everywhere
def test_scores_are_float32_and_finite_whatever_the_empty_slots_hold(scorer, make_story):
    story = make_story(lengths=(29, 17))
    view = story.view()
    scores = scorer.score(view)
    assert scores.shape == view.keys.shape[:3]
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert_alike(in_order(scores, view), in_order(scorer.score(story.view(empty=7.0)), view))


@everywhere
def test_moving_the_kept_tokens_together_changes_nothing(scorer, make_story):
    story = make_story(lengths=(29, 17))
    compact, in_place = story.view(compact=True), story.view(compact=False)
    assert compact.keys.shape[2] < in_place.keys.shape[2]
    assert_alike(in_order(scorer.score(compact), compact), in_order(scorer.score(in_place), in_place))


@everywhere
def test_a_row_is_scored_as_if_it_were_alone(scorer, make_story):
    story = make_story(lengths=(29, 11, 23))
    together = story.view(compact=False)
    expected = in_order(scorer.score(together), together)
    for row in range(3):
        alone = story.rows(row).view(compact=False)
        assert_alike(in_order(scorer.score(alone), alone), expected[row : row + 1])


@everywhere
def test_heads_may_change_places(scorer, make_story):
    story = make_story(num_kv_heads=3, group=2)
    order = [2, 0, 1]
    torch.testing.assert_close(
        scorer.score(story.permuted(order).view()), scorer.score(story.view())[:, order], rtol=1e-5, atol=1e-6
    )


@everywhere
@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_rows_are_scored(scorer, make_story, length):
    scores = scorer.score(make_story(lengths=(length,)).view())
    assert scores.shape[2] == length
    assert scores.isfinite().all()


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_caches_of_any_precision_are_scored_in_float32(scorer, make_story, dtype):
    view = make_story().view(dtype=dtype)
    wide = replace(
        view,
        keys=view.keys.float(),
        values=view.values.float(),
        queries=replace(view.queries, rotated=view.queries.rotated.float()),
    )
    scores = scorer.score(view)
    assert scores.dtype == torch.float32
    # The same numbers in float32: the scorer must not have rounded on its way.
    assert_alike(in_order(scores, view), in_order(scorer.score(wide), wide), rtol=1e-4, atol=1e-5)


@everywhere
def test_queries_kept_for_others_make_no_difference(scorer, make_story):
    story, least = make_story(), max(scorer.needs.queries, 1)
    torch.testing.assert_close(scorer.score(story.view(window=29)), scorer.score(story.view(window=least)))


@everywhere
def test_a_row_without_queries_is_scored(scorer, make_story):
    view = make_story(lengths=(29, 17)).view()
    rotated, positions = view.queries.rotated.clone(), view.queries.positions.clone()
    rotated[1], positions[1] = float("nan"), -1
    statistics = replace(view.statistics)
    for field in fields(statistics):
        getattr(statistics, field.name)[1] = 0
    scores = scorer.score(replace(view, queries=QueryWindow(rotated, positions), statistics=statistics))
    assert scores.isfinite().all()


@everywhere
def test_the_view_is_only_read(scorer, make_story):
    view, untouched = make_story().view(), make_story().view()
    scorer.score(view)

    for mine, original in zip(tensors_of(view), tensors_of(untouched), strict=True):
        torch.testing.assert_close(mine, original, rtol=0, atol=0, equal_nan=True)


# kvpress turns queries in one layout only.
@pytest.mark.parametrize(
    "scorer",
    [
        pytest.param(scorer, id=name)
        for name, scorer in SCORERS.items()
        if not (isinstance(scorer, KVPressScorer) and scorer.needs.rotary)
    ],
)
def test_layouts_of_rope(scorer, make_story):
    for options in ({"interleaved": True}, {"rotated_dims": 4}, {"attention_scaling": 1.3}):
        story = make_story(**options)
        compact, in_place = story.view(), story.view(compact=False)
        assert_alike(in_order(scorer.score(compact), compact), in_order(scorer.score(in_place), in_place))


@everywhere
def test_equal_options_make_equal_scorers(scorer):
    assert scorer == replace(scorer)
