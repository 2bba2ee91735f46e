import copy
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kvstitch.scorers import ExpectedAttention, KeyDiff, KeyNorm, KVPressScorer, SnapKV
from kvstitch.scorers.kvpress_recipes import RECIPES, REFUSED
from kvstitch.views import LayerView, Needs, QueryWindow, Rotary

# Installed and not importable is a failure, and no reason to skip.
if find_spec("kvpress") is None:
    pytest.skip("kvpress is not installed", allow_module_level=True)
import kvpress  # noqa: E402

LENGTH, HEADS, GROUP, DIMS = 24, 2, 3, 8
WORKING = {
    "Knorm": kvpress.KnormPress(),
    "KeyDiff": kvpress.KeyDiffPress(),
    "LagKV": kvpress.LagKVPress(n_sink=2, lag_size=6),
    "LagKV_short": kvpress.LagKVPress(),
    "CUR": kvpress.CURPress(local_window_size=5),
    "CUR_random": kvpress.CURPress(use_random_leverage=True),
    "Random": kvpress.RandomPress(seed=3),
    "Random_unseeded": kvpress.RandomPress(),
    "Leverage": kvpress.LeverageScorePress(sketch_dimension=4),
    "TOVA": kvpress.TOVAPress(),
    "SnapKV": kvpress.SnapKVPress(window_size=6),
    "PyramidKV": kvpress.PyramidKVPress(window_size=6),
    "ExpectedAttention": kvpress.ExpectedAttentionPress(epsilon=1e-2),
    "Cap": kvpress.CapPress(),
}
REFUSING = [
    kvpress.StreamingLLMPress(),
    kvpress.ObservedAttentionPress(),
    kvpress.NonCausalAttnPress(),
    kvpress.CompactorPress(),
    kvpress.CriticalKVPress(kvpress.KnormPress()),
    kvpress.KVzapPress(),
    kvpress.ExpectedAttentionStatsPress(),
]


@pytest.fixture
def prefill():
    """A Llama attention module that has just read a prompt: what kvpress would be called with, and the view of it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        head_dim=DIMS,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        num_hidden_layers=4,
    )
    module = LlamaAttention(config, layer_idx=2)
    module.rotary_emb = LlamaRotaryEmbedding(config)
    hidden = torch.randn(1, LENGTH, 32) * 3
    with torch.no_grad():
        queries, keys, values = (
            projection(hidden).view(1, LENGTH, -1, DIMS).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        cos, sin = module.rotary_emb(hidden, torch.arange(LENGTH)[None])
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
    view = LayerView(
        keys=keys,
        values=values,
        positions=torch.arange(LENGTH).expand(1, HEADS, LENGTH),
        valid=torch.ones(1, HEADS, LENGTH, dtype=torch.bool),
        scaling=DIMS**-0.5,
        next_position=torch.tensor([LENGTH]),
        layer_idx=2,
        num_layers=4,
        queries=QueryWindow(queries, torch.arange(LENGTH)[None]),
        rotary=Rotary(module.rotary_emb.inv_freq.double()),
    )
    return SimpleNamespace(module=module, hidden=hidden, view=view, kwargs={"position_embeddings": (cos, sin)})


@pytest.mark.parametrize("name", WORKING)
def test_equals_kvpress_at_the_end_of_a_prefill(name, prefill):
    """There kvpress's own positions are right, so its score is the reference."""
    press = WORKING[name]
    # Its fit leaves out the queries of the first four tokens.
    scorer = KVPressScorer(press, window_size=LENGTH - 4)
    torch.manual_seed(scorer.seed + prefill.view.layer_idx)
    with torch.no_grad():
        expected = press.score(
            prefill.module, prefill.hidden, prefill.view.keys, prefill.view.values, None, prefill.kwargs
        )
    actual = scorer.score(prefill.view)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WORKING)
def test_each_row_is_scored_alone_on_what_it_holds(name, make_story):
    scorer = KVPressScorer(WORKING[name], window_size=12)
    story = make_story(lengths=(29, 17), alike=True)
    compact, in_place = story.view(), story.view(compact=False)
    scores, moved = scorer.score(compact), scorer.score(in_place)
    assert scores.isfinite().all()
    torch.testing.assert_close(scores[compact.valid], moved[in_place.valid])
    alone = story.rows(1).view()
    torch.testing.assert_close(scorer.score(alone)[alone.valid], scores[1][compact.valid[1]])


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_rows(name, length, make_story):
    assert KVPressScorer(WORKING[name]).score(make_story(lengths=(length,)).view()).isfinite().all()


def test_heads_that_hold_different_numbers_are_scored_apart(make_story):
    story = make_story(lengths=(29,))
    story.kept[0, 0, 3:7] = ~story.kept[0, 0, 3:7]
    view = story.view()
    assert view.valid.sum(-1).unique().numel() == 2
    torch.testing.assert_close(KVPressScorer(kvpress.KeyDiffPress()).score(view), KeyDiff().score(view))
    torch.testing.assert_close(KVPressScorer(kvpress.KnormPress()).score(view), KeyNorm().score(view))


def test_queries_are_asked_at_their_own_positions_while_decoding(make_story):
    """After an eviction kvpress's own SnapKV would turn the whole window to one position."""
    story = make_story(lengths=(29,), alike=True)
    story.kept[:, :, -8:] = True
    view = story.view()
    actual = KVPressScorer(kvpress.SnapKVPress(window_size=6, kernel_size=1)).score(view)
    expected = SnapKV(window_size=6, kernel_size=1).score(view)
    torch.testing.assert_close(actual[..., :-6], expected[..., :-6])


def test_the_future_is_the_true_one_while_decoding(make_story):
    story = make_story(lengths=(29,), alike=True)
    story.kept[:, :, :4] = True
    view = story.view(window=9)
    actual = KVPressScorer(kvpress.ExpectedAttentionPress(n_future_positions=20, epsilon=0.01), window_size=9).score(
        view
    )
    expected = ExpectedAttention(num_future_positions=20, epsilon=0.01, window_size=9).score(view)
    torch.testing.assert_close(actual[..., 4:], expected[..., 4:], rtol=1e-4, atol=1e-6)


def test_what_each_press_needs():
    assert KVPressScorer(kvpress.KnormPress()).needs == Needs()
    assert KVPressScorer(kvpress.LeverageScorePress()).needs == Needs(rotary=True)
    assert KVPressScorer(kvpress.TOVAPress()).needs == Needs(queries=1)
    assert KVPressScorer(kvpress.PyramidKVPress(window_size=40)).needs == Needs(queries=40)
    assert KVPressScorer(kvpress.ExpectedAttentionPress(), window_size=99).needs == Needs(queries=99, rotary=True)


@pytest.mark.parametrize("press", REFUSING, ids=lambda press: type(press).__name__)
def test_presses_that_cannot_be_served_say_why(press):
    name = type(press).__name__
    with pytest.raises(NotImplementedError, match=f"cannot serve {name}: it"):
        KVPressScorer(press)


def test_every_scorer_press_of_kvpress_is_decided_about():
    decided = RECIPES.keys() | REFUSED.keys()
    for name in kvpress.__all__:
        press = getattr(kvpress, name)
        if isinstance(press, type) and issubclass(press, kvpress.ScorerPress) and press is not kvpress.ScorerPress:
            assert any(ancestor.__name__ in decided for ancestor in press.__mro__), name


@pytest.mark.parametrize("press", [kvpress.AdaKVPress(kvpress.KnormPress()), "KnormPress", None])
def test_only_scorer_presses(press):
    with pytest.raises(TypeError, match="must be an instance of a kvpress ScorerPress"):
        KVPressScorer(press)


def test_q_filters_work_once_they_are_there(make_story):
    press = kvpress.QFilterPress()
    with pytest.raises(NotImplementedError, match="QFilterPress without filters"):
        KVPressScorer(press)
    # As they come from the hub.
    press.q_filters = torch.nn.Parameter(torch.randn(8, 2, 8))
    view = make_story().view(empty=0.0)
    expected = -(press.q_filters[view.layer_idx][None, :, None] * view.keys).sum(-1)
    scores = KVPressScorer(press).score(view)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected.detach())


@dataclass
class ValueNorm(kvpress.ScorerPress):
    """Somebody's own press, which reads nothing but values."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return values.norm(dim=-1)


@dataclass
class HiddenNorm(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return hidden_states.norm(dim=-1)


@dataclass
class FirstHidden(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return hidden_states[:, 0]


@dataclass
class OutputProjection(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return module.o_proj(values)


@dataclass
class NotANumber(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[..., 0] / 0 * 0


@dataclass
class OneTooMany(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.ones(*keys.shape[:2], keys.shape[2] + 1)


def test_presses_of_others_get_keys_and_values(make_story):
    view = make_story().view(empty=0.0)
    torch.testing.assert_close(KVPressScorer(ValueNorm()).score(view), view.values.norm(dim=-1))


@pytest.mark.parametrize("press", [HiddenNorm(), FirstHidden()])
def test_presses_of_others_that_read_hidden_states(press, make_story):
    with pytest.raises(NotImplementedError, match="reads hidden states, which scorers never see"):
        KVPressScorer(press).score(make_story().view())


def test_presses_of_others_that_read_the_module(make_story):
    with pytest.raises(AttributeError, match="stand-in for the attention module has no 'o_proj'"):
        KVPressScorer(OutputProjection()).score(make_story().view())


def test_nan_ranks_last(make_story):
    view = make_story().view()
    scores = KVPressScorer(NotANumber()).score(view)
    assert (scores[view.valid] == torch.finfo(torch.float32).min).all()


def test_scores_of_the_wrong_shape(make_story):
    with pytest.raises(ValueError, match=r"OneTooMany returned \[1, .*expected \[1, "):
        KVPressScorer(OneTooMany()).score(make_story(alike=True).view())


@pytest.mark.parametrize("name", ["Leverage", "Random_unseeded", "CUR_random"])
def test_draws_repeat_and_leave_the_generator_alone(name, make_story):
    view, before = make_story().view(), torch.get_rng_state()
    one, other = (KVPressScorer(WORKING[name], seed=seed).score(view) for seed in (1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, KVPressScorer(WORKING[name], seed=1).score(view))
    assert not torch.equal(one, other)


def test_the_press_is_left_as_it_was(make_story):
    press = kvpress.SnapKVPress(window_size=64)
    before = copy.deepcopy(press)
    KVPressScorer(press).score(make_story(lengths=(9,)).view())
    assert press == before


def test_scaling_of_the_model_is_used(make_story):
    view = make_story(alike=True).view()
    scorer = KVPressScorer(kvpress.TOVAPress())
    other = replace(view, scaling=1.0)
    ratio = other.scaling / view.scaling
    wide = replace(view, queries=QueryWindow(view.queries.rotated * ratio, view.queries.positions))
    torch.testing.assert_close(scorer.score(other), scorer.score(wide), rtol=1e-4, atol=1e-6)
    assert not math.isclose(float(scorer.score(other)[0, 0, 0]), float(scorer.score(view)[0, 0, 0]), rel_tol=1e-3)


def test_ropes_that_kvpress_cannot_turn(make_story):
    scorer = KVPressScorer(kvpress.ExpectedAttentionPress())
    for options in ({"interleaved": True}, {"rotated_dims": 4}):
        with pytest.raises(NotImplementedError, match="unlike this model; use kvstitch.scorers.ExpectedAttention"):
            scorer.score(make_story(**options).view())
