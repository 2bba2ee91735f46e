"""Promises at the edges: padding without positions, roll-back with queries, budgets that cannot be, models that mislead."""

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GenerationConfig,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from kvstitch.allocators import GlobalTopK, HeadAdaptive, Pyramid, SegmentQuota
from kvstitch.presses import EvictionPress, UnsupportedModel
from kvstitch.presses.cache import Request, StitchLayer
from kvstitch.scorers import TOVA, ExpectedAttention, KeyDiff, Scorer, TriAttention

SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def step_through(model, ids, mask, sizes, cache=None):
    """A hand-written loop that passes a mask and no positions; returns the logits and the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    start, logits = cache.get_seq_length(), []
    for size in sizes:
        stop = start + size
        with torch.no_grad():
            output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        logits.append(output.logits)
        start = stop
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("budget", [12, 0.4])
@pytest.mark.parametrize("scorer", [KeyDiff(), ExpectedAttention(num_future_positions=16)])
def test_padded_rows_of_a_hand_written_loop_are_their_own_single_runs(model, random_tokens, budget, scorer):
    press = EvictionPress(scorer, GlobalTopK(num_sinks=2, num_recent=2), budget, interval=4, compress_prompt=True)
    ids, lengths, steps = random_tokens(2, 42), (30, 20), [1] * 12
    mask = torch.ones(2, 42, dtype=torch.int64)
    mask[1, :10] = 0
    with press(model) as run:
        batched, _ = step_through(model, ids, mask, [30, *steps])
        kept = [run.positions(layer) for layer in run.layers]
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, 30 - length :]
        with press(model) as run:
            single, _ = step_through(model, own, torch.ones_like(own), [length, *steps])
            for ours, expected in zip(kept, (run.positions(layer) for layer in run.layers)):
                for head in range(ours.shape[1]):
                    assert ours[row, head][ours[row, head] >= 0].tolist() == expected[0, head].tolist()
        assert (batched[row, 30:] - single[0, length:]).abs().max() < 1e-4


def test_next_position_survives_the_eviction_of_the_newest_token(llama, random_tokens):
    class Oldest(Scorer):
        def score(self, view):
            return -view.positions.float()

    press = EvictionPress(Oldest(), GlobalTopK(num_sinks=1, num_recent=0), 8, interval=100)
    with press(llama) as run:
        step_through(llama, random_tokens(1, 20), torch.ones(1, 20), [20])
        run.compact()
        layer = run.layers[0]
        assert layer.positions[0, 0].tolist() == list(range(8))
        assert layer.view(1.0, None, 0, 4).next_position.tolist() == [20]


@pytest.mark.parametrize("scorer", [TOVA(), TriAttention()])
def test_roll_back_is_refused_where_queries_are_remembered(llama, random_tokens, scorer):
    ids = random_tokens(1, 26)
    with EvictionPress(scorer, GlobalTopK(num_sinks=1, num_recent=1), 9, interval=50)(llama):
        _, cache = step_through(llama, ids, torch.ones_like(ids), [20, 1, 1])
        before = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(RuntimeError, match="copy the cache"):
            cache.crop(-1)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before))


def test_a_roll_back_takes_its_tokens_off_the_interval(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 40)
    with EvictionPress(key_hash, shaped_topk(), budget=9, interval=6)(llama) as run:
        _, cache = step_through(llama, ids, torch.ones_like(ids), [20, 1, 1, 1, 1])
        cache.crop(-3)
        step_through(llama, ids, torch.ones_like(ids), [1] * 5, cache)
        assert run.num_events == 0
        step_through(llama, ids, torch.ones_like(ids), [1], cache)
        assert run.num_events == 1


def test_a_crop_to_nothing_begins_anew(llama, random_tokens):
    ids, press = random_tokens(1, 40), EvictionPress(TOVA(), SegmentQuota(num_recent=2), 16, interval=5)
    with press(llama):
        fresh, _ = step_through(llama, ids, torch.ones_like(ids), [20] + [1] * 12)
    with press(llama):
        _, cache = step_through(llama, ids.flip(1), torch.ones_like(ids), [20, 1, 1])
        cache.crop(-22)
        again, _ = step_through(llama, ids, torch.ones_like(ids), [20] + [1] * 12, cache)
    assert torch.equal(fresh, again)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pyramid_spends_the_budget_of_the_layers_that_share_it(make_model, random_tokens, name):
    model = make_model(name)
    press = EvictionPress(KeyDiff(), Pyramid(allocator=GlobalTopK(num_sinks=2, num_recent=2)), 20, interval=8)
    with press(model) as run:
        ids = random_tokens(1, 90)
        step_through(model, ids, torch.ones_like(ids), [80, *[1] * 9])
    kept = [layer.slots_after for layer in run.events[0].layers]
    assert sum(kept) == 20 * len(kept) and kept == sorted(kept, reverse=True) and len(set(kept)) > 1


def test_a_budget_that_holds_everything_does_nothing_even_if_layers_differ(llama, random_tokens):
    ids = random_tokens(1, 40)
    with EvictionPress(KeyDiff(), Pyramid(), 60, interval=4)(llama) as run:
        step_through(llama, ids, torch.ones_like(ids), [30, *[1] * 10])
    assert run.num_events == 0 and run.stored_tokens == [40] * 4


def test_a_budget_in_bytes_that_buys_nothing_is_refused_before_anything_runs(llama):
    press = EvictionPress(KeyDiff(), GlobalTopK(), "1KB", interval=4)
    # 4 layers of 2 heads with 16 numbers of 4 bytes, keys and values.
    with pytest.raises(ValueError, match=r"1000 bytes buys 0 slots per kv head \(1024 bytes each"):
        press(llama)


def test_options_are_seen_however_they_are_passed(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 12)
    with EvictionPress(key_hash, shaped_topk(), 9)(llama):
        with pytest.raises(NotImplementedError, match="prompt_lookup_num_tokens"):
            llama.generate(ids, GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=2))
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            llama.generate(ids, max_new_tokens=2, use_cache=False)


def test_sliding_layers_are_named_once(make_model, random_tokens, key_hash, shaped_topk):
    with pytest.warns(UserWarning, match="2 of 4 layers of Gemma3ForCausalLM have a sliding window") as caught:
        run = EvictionPress(key_hash, shaped_topk(), 9, interval=4)(make_model("gemma3"))
        with run:
            ids = random_tokens(1, 30)
            step_through(run.model, ids, torch.ones_like(ids), [20, *[1] * 10])
    assert len([warning for warning in caught if "sliding window" in str(warning.message)]) == 1


def test_nan_scores_are_said_once_and_never_win(llama, random_tokens):
    class SomeNaN(Scorer):
        def score(self, view):
            return torch.where(view.positions % 3 == 0, torch.nan, view.positions.float())

    ids = random_tokens(1, 40)
    with pytest.warns(UserWarning, match="SomeNaN scored some tokens NaN") as caught:
        with EvictionPress(SomeNaN(), GlobalTopK(num_sinks=0, num_recent=0), 9, interval=4)(llama) as run:
            step_through(llama, ids, torch.ones_like(ids), [25, *[1] * 13])
    assert len([warning for warning in caught if "NaN" in str(warning.message)]) == 1 and run.num_events == 3
    assert all((event.layers[0].positions % 3 != 0).all() for event in run.events)


def test_a_scorer_that_knows_too_little_waits(llama, random_tokens):
    ids = random_tokens(1, 40)
    with EvictionPress(TriAttention(), GlobalTopK(num_sinks=1, num_recent=1), 6, interval=4)(llama) as run:
        step_through(llama, ids, torch.ones_like(ids), [4, *[1] * 15])
        assert run.num_events == 0
        step_through(llama, ids, torch.ones_like(ids), [1] * 2, run.cache)
        assert run.num_events == 1 and run.events[0].seen_tokens == 20


def test_a_row_that_waits_does_not_hold_up_its_neighbours(llama, random_tokens):
    """Row 0 has 12 tokens when row 1, with 30, is due; afterwards each holds what it would hold alone."""
    ids, mask = random_tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :18] = 0
    press = EvictionPress(TriAttention(), GlobalTopK(num_sinks=1, num_recent=1), 20, interval=5)
    with press(llama) as run:
        step_through(llama, ids, mask, [25, *[1] * 6])
        (event,) = run.events
        assert event.seen_tokens == 30
        together = run.positions(layer=0)
    for row, start in ((0, 18), (1, 0)):
        with press(llama) as run:
            step_through(llama, ids[row : row + 1, start:], mask[row : row + 1, start:], [25 - start, *[1] * 6])
        alone = run.positions(layer=0)[0]
        for head in range(alone.shape[0]):
            assert sorted(together[row, head][together[row, head] >= 0].tolist()) == alone[head].tolist()


def test_kept_bytes_leave_out_what_is_stored_but_empty(llama, random_tokens):
    ids = random_tokens(1, 60)
    per_slot = 2 * 16 * 4
    for mode in ("ragged", "mask"):
        press = EvictionPress(KeyDiff(), HeadAdaptive(mode=mode, num_sinks=1, num_recent=1), 12, interval=8)
        with press(llama) as run:
            step_through(llama, ids, torch.ones_like(ids), [50, *[1] * 8])
            run.compact()
        assert run.kept_bytes == 4 * 2 * 12 * per_slot
        longest = [max(int((heads >= 0).sum()) for heads in run.positions(layer)[0]) for layer in run.layers]
        stored = [58] * 4 if mode == "mask" else longest
        assert run.stored_tokens == stored and run.stored_bytes == sum(stored) * 2 * per_slot


@pytest.mark.parametrize(
    "build, scorer, reason",
    [
        (lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE)), ExpectedAttention(), r"layers \[3\] .* have no RoPE"),
        (
            lambda: Cohere2ForCausalLM(
                Cohere2Config(**SHAPE, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)
            ),
            TriAttention(),
            r"layers \[1, 3\] .* have no RoPE",
        ),
        (
            lambda: DeepseekV3ForCausalLM(
                DeepseekV3Config(
                    **SHAPE | {"num_key_value_heads": 4},
                    q_lora_rank=16,
                    kv_lora_rank=16,
                    qk_rope_head_dim=8,
                    qk_nope_head_dim=8,
                    v_head_dim=16,
                    first_k_dense_replace=4,
                    n_routed_experts=2,
                    num_experts_per_tok=1,
                    n_group=1,
                    topk_group=1,
                )
            ),
            KeyDiff(),
            "latent attention",
        ),
    ],
    ids=["smollm3", "cohere2", "deepseek_v3"],
)
def test_models_that_would_mislead_a_scorer_are_refused(build, scorer, reason):
    model = build().eval()
    with pytest.raises(UnsupportedModel, match=reason):
        EvictionPress(scorer, GlobalTopK(), 16)(model)
    if "RoPE" in reason:
        EvictionPress(TOVA(), GlobalTopK(), 16)(model)


def test_all_layers_of_a_reset_cache_share_the_new_beginning():
    request = Request(in_prefill=False, counted_from=9, num_events=2)
    layers = [StitchLayer(request, growth_tokens=8) for _ in range(2)]
    for layer in layers:
        layer.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4))
        layer.reset()
    assert layers[0].request is layers[1].request and request == Request()
    assert [layer.get_seq_length() for layer in layers] == [0, 0] and not layers[0].is_initialized
