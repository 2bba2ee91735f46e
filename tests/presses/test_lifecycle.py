"""State lives per request, everything is restored, and what cannot work is refused before it runs."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from kvstitch.presses import EvictionPress, UnsupportedModel


def fingerprint(model):
    """Everything that a press touches on a model and in the process."""
    return (
        model.config._attn_implementation,
        "generate" in vars(model),
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
    )


def generate(model, ids, **options):
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, **options
    )


@pytest.fixture
def press(key_hash, shaped_topk):
    return EvictionPress(key_hash, shaped_topk(), budget=9, interval=5, compress_prompt=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_samples_do_not_depend_on_their_order(model, random_tokens, press, attention):
    model.set_attn_implementation(attention)
    a, b = random_tokens(1, 21, seed=1), random_tokens(1, 34, seed=2)
    with press(model):
        first = [generate(model, a), generate(model, b)]
    with press(model):
        second = [generate(model, b), generate(model, a), generate(model, a)]
    assert torch.equal(first[0], second[1]) and torch.equal(first[0], second[2])
    assert torch.equal(first[1], second[0])


def test_two_requests_interleaved(llama, random_tokens, press):
    prompts = [random_tokens(1, 21, seed=1), random_tokens(1, 28, seed=2)]
    alone = []
    with press(llama), torch.no_grad():
        for ids in prompts:
            cache, token = DynamicCache(config=llama.config), ids
            for _ in range(15):
                token = llama(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                alone.append(int(token))
        caches, tokens, together = [DynamicCache(config=llama.config) for _ in prompts], list(prompts), [[], []]
        for _ in range(15):
            for i in (0, 1):
                tokens[i] = llama(tokens[i], past_key_values=caches[i], use_cache=True).logits[:, -1:].argmax(-1)
                together[i].append(int(tokens[i]))
    assert alone == together[0] + together[1]


def test_everything_is_restored(model, random_tokens, press):
    # transformers itself leaves attributes on a model at its first generate.
    generate(model, random_tokens(1, 20))
    before = fingerprint(model)
    with press(model):
        assert fingerprint(model) != before
        generate(model, random_tokens(1, 20))
    assert fingerprint(model) == before


@pytest.mark.parametrize("moment", ["prefill", "decode", "event"])
def test_an_exception_leaves_nothing_behind(llama, random_tokens, press, moment):
    ids = random_tokens(1, 20)
    with press(llama):
        expected = generate(llama, ids)
    before = fingerprint(llama)
    calls = {"forward": 0, "event": 0}

    def fail(module, args, kwargs):
        calls["forward"] += 1
        if calls["forward"] == (1 if moment == "prefill" else 8):
            raise ZeroDivisionError("on purpose")

    def fail_event(event):
        raise ZeroDivisionError("on purpose")

    broken = (
        EvictionPress(press.scorer, press.allocator, 9, interval=5, on_event=fail_event) if moment == "event" else press
    )
    hook = llama.model.layers[2].register_forward_pre_hook(fail, with_kwargs=True) if moment != "event" else None
    with pytest.raises(ZeroDivisionError), broken(llama):
        generate(llama, ids)
    if hook is not None:
        hook.remove()
    assert fingerprint(llama) == before
    with press(llama):
        assert torch.equal(generate(llama, ids), expected)


def test_nested_presses_are_refused(llama, press):
    before = fingerprint(llama)
    with press(llama):
        with pytest.raises(RuntimeError, match="another press is at work"), press(llama):
            pass
    assert fingerprint(llama) == before


@pytest.mark.parametrize("case", ["entered twice", "paused twice", "entered while paused"])
def test_one_run_within_itself_restores_everything(llama, random_tokens, press, case):
    ids = random_tokens(1, 20)
    # transformers itself leaves attributes on a model at its first generate.
    generate(llama, ids)
    before = fingerprint(llama)
    run = press(llama)
    with run:
        pressed = generate(llama, ids)
        if case == "entered twice":
            with pytest.raises(RuntimeError, match="this press is at work"), run:
                pass
        else:
            with run.paused(), run if case == "entered while paused" else run.paused():
                pass
        assert torch.equal(generate(llama, ids), pressed)
    assert fingerprint(llama) == before
    generate(llama, ids)
    with press(llama):
        assert torch.equal(generate(llama, ids), pressed)


def test_a_refused_forward_evicts_nothing(llama, random_tokens, press):
    ids = random_tokens(1, 20)
    with press(llama) as run, torch.no_grad():
        cache = llama(ids, use_cache=True).past_key_values
        with pytest.raises(NotImplementedError, match="2-D attention mask"):
            llama(ids[:, :1], past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 21))
        with pytest.raises(NotImplementedError, match="position_ids of shape"):
            llama(ids[:, :1], past_key_values=cache, position_ids=torch.zeros(3, 1, 1, dtype=torch.int64))
        assert run.stored_tokens == [20] * 4 and not run.events


def test_a_forward_that_ended_in_the_middle_is_not_gone_on_from(llama, random_tokens, press):
    ids = random_tokens(1, 20)
    with press(llama), torch.no_grad():
        cache = llama(ids, use_cache=True).past_key_values
        hook = llama.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(ids[:, :1], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="forward or roll-back .* 20 to 21 tokens; begin with a new cache"):
            llama(ids[:, :1], past_key_values=cache)
        llama(ids, use_cache=True)


def test_the_mask_of_the_whole_text_may_come_with_each_chunk(llama, left_padded, press):
    """Its columns are those of the text, and not the last ones: padding of the first chunk is padding."""
    ids, mask, _ = left_padded([30, 17])
    runs = {}
    for whole in (False, True):
        with press(llama) as run, torch.no_grad():
            logits, cache, start = [], None, 0
            for size in (10, 9, 6, 1, 1, 1, 1, 1):
                part, start = slice(start, start + size), start + size
                given = mask if whole else mask[:, :start]
                out = llama(ids[:, part], attention_mask=given, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
            runs[whole] = torch.cat(logits, 1)[mask.bool()], run.positions(0)
    assert torch.equal(runs[True][1], runs[False][1]) and (runs[True][0] - runs[False][0]).abs().max() < 1e-5
    with press(llama), torch.no_grad(), pytest.raises(ValueError, match="cover at least the 3 new tokens.*shape"):
        llama(ids[:, :3], attention_mask=mask[:, -1:])


def test_a_roll_back_that_ended_in_the_middle_is_not_gone_on_from(make_model, random_tokens, press):
    """Gemma's sliding layer comes first and, not having forgotten anything yet, is cut before a layer that evicted refuses."""
    model, ids = make_model("gemma3"), random_tokens(1, 10)
    with pytest.warns(UserWarning, match="sliding window"), press(model) as run, torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
        assert run.num_events == 1
        sliding = next(layer for layer in cache.layers if layer not in run.layers.values())
        assert sliding.get_seq_length() == 11 < sliding.sliding_window
        with pytest.raises(RuntimeError, match="cannot roll the cache back"):
            cache.crop(-5)
        assert sliding.get_seq_length() == 6 and run.seen_tokens == 11
        with pytest.raises(RuntimeError, match="a forward or roll-back of this cache ended in the middle"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("mask", ["none", "short"])
def test_a_padded_cache_remembers_its_padding(llama, left_padded, press, mask):
    """A loop that leaves the mask out, or gives that of the new tokens only, gets what the whole mask gives."""
    ids, whole, _ = left_padded([20, 11])
    new = ids[:, -3:]
    with press(llama), torch.no_grad():
        logits = []
        for given in (mask, "whole"):
            cache = llama(ids, attention_mask=whole, use_cache=True).past_key_values
            seen = whole
            for token in new.split(1, dim=1):
                seen = torch.cat((seen, seen.new_ones(2, 1)), dim=1)
                masks = {"none": None, "short": seen[:, -1:], "whole": seen}
                logits.append(llama(token, past_key_values=cache, attention_mask=masks[given]).logits)
    assert (torch.cat(logits[:3]) - torch.cat(logits[3:])).abs().max() < 1e-5


def test_a_mixed_model_is_rolled_back_whole_or_not_at_all(key_hash, shaped_topk, random_tokens):
    """The full layers come first, and a sliding layer behind them that has forgotten refuses."""
    config = Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, use_sliding_window=True, sliding_window=8, max_window_layers=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="sliding window"), torch.no_grad():
        with EvictionPress(key_hash, shaped_topk(), budget=9, interval=50)(model):
            cache = model(random_tokens(1, 20), use_cache=True).past_key_values
            with pytest.raises(RuntimeError, match="sliding-window layers saw 20 tokens and remember the last 8"):
                cache.crop(-2)
            assert [layer.get_seq_length() for layer in cache.layers] == [20] * 4
            short = model(random_tokens(1, 6), use_cache=True).past_key_values
            short.crop(-2)
            assert [layer.get_seq_length() for layer in short.layers] == [4] * 4


def test_paused_gives_the_dense_model(llama, random_tokens, press):
    ids = random_tokens(1, 20)
    dense = generate(llama, ids)
    with press(llama) as run:
        pressed = generate(llama, ids)
        stored = run.stored_tokens
        with run.paused():
            assert torch.equal(generate(llama, ids), dense)
        assert run.stored_tokens == stored
        assert torch.equal(generate(llama, ids), pressed)


def test_a_cache_filled_before_the_press_is_taken_over(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 30)
    press = EvictionPress(key_hash, shaped_topk(), budget=9, interval=5, compress_prompt=True)
    outputs = []
    for inside in (True, False):
        cache = DynamicCache(config=llama.config)
        with torch.no_grad():
            if not inside:
                llama(ids, past_key_values=cache, use_cache=True)
            with press(llama) as run:
                if inside:
                    llama(ids, past_key_values=cache, use_cache=True)
                outputs.append(llama(random_tokens(1, 1, seed=9), past_key_values=cache, use_cache=True).logits)
                assert run.stored_tokens == [10] * 4
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5


def test_a_copied_cache_goes_on_like_the_original(llama, random_tokens, press):
    """One prompt, several continuations: copies share nothing, and the copy keeps what the press had stored in it."""
    import copy

    ids = random_tokens(1, 40)
    with press(llama), torch.no_grad():
        cache = DynamicCache(config=llama.config)
        llama(ids[:, :30], past_key_values=cache, use_cache=True)
        llama(ids[:, 30:31], past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        logits = [llama(ids[:, i : i + 1], past_key_values=cache).logits for i in range(31, 40)]
        again = [llama(ids[:, i : i + 1], past_key_values=twin).logits for i in range(31, 40)]
    assert torch.equal(torch.cat(logits), torch.cat(again))
    assert torch.equal(cache.layers[0].positions, twin.layers[0].positions)
    assert cache.layers[0].keys.data_ptr() != twin.layers[0].keys.data_ptr()


def test_leaving_the_press_keeps_an_unpadded_cache_usable(llama, random_tokens, press, gold_logits):
    ids = random_tokens(1, 40)
    cache = DynamicCache(config=llama.config)
    with torch.no_grad():
        with press(llama) as run:
            llama(ids[:, :30], past_key_values=cache, use_cache=True)
            llama(ids[:, 30:31], past_key_values=cache, use_cache=True)
        logits = llama(
            ids[:, 31:], past_key_values=cache, use_cache=True, position_ids=torch.arange(31, 40)[None]
        ).logits
    gold = gold_logits(llama, ids, torch.ones_like(ids), run.events)[:, 31:]
    assert (logits - gold).abs().max() < 1e-4


def test_leaving_the_press_with_a_ragged_cache_is_refused(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 30)
    cache = DynamicCache(config=llama.config)
    press = EvictionPress(key_hash, shaped_topk(shape="ragged"), budget=9, interval=5, compress_prompt=True)
    with torch.no_grad():
        with press(llama):
            llama(ids, past_key_values=cache, use_cache=True)
            llama(ids[:, :1], past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError, match="continue it inside"):
            llama(ids[:, :1], past_key_values=cache, use_cache=True)


def test_roll_back_is_exact_or_refused(llama, random_tokens, press):
    ids = random_tokens(1, 26)
    cache, other = DynamicCache(config=llama.config), DynamicCache(config=llama.config)
    with press(llama), torch.no_grad():
        for target, tokens in ((cache, ids), (other, ids[:, :22])):
            llama(tokens[:, :20], past_key_values=target, use_cache=True)
            for i in range(20, tokens.shape[1] if target is other else 24):
                llama(tokens[:, i : i + 1], past_key_values=target, use_cache=True)
        cache.crop(-2)
        assert cache.get_seq_length() == other.get_seq_length() == 22
        for ours, expected in zip(cache.layers, other.layers):
            assert torch.equal(ours.keys, expected.keys) and torch.equal(ours.positions, expected.positions)
            assert ours.keys.untyped_storage().nbytes() == ours.keys.numel() * 4
        with pytest.raises(RuntimeError, match="cannot roll the cache back to 19"):
            cache.crop(-3)


@pytest.mark.parametrize("option", [dict(cache_implementation="static"), dict(prompt_lookup_num_tokens=3)])
def test_generate_options_that_cannot_work_are_refused_before_the_first_forward(llama, random_tokens, press, option):
    ran = []
    llama.model.register_forward_hook(lambda *a: ran.append(1))
    with press(llama), pytest.raises(NotImplementedError, match=next(iter(option)).split("_")[0]):
        generate(llama, random_tokens(1, 12), **option)
    assert not ran


def test_assistant_model_is_refused(llama, make_model, random_tokens, press):
    with press(llama), pytest.raises(NotImplementedError, match="assisted decoding"):
        generate(llama, random_tokens(1, 12), assistant_model=make_model("llama"))


def test_static_cache_is_refused_by_name(llama, random_tokens, press):
    cache = StaticCache(config=llama.config, max_cache_len=64)
    with press(llama), pytest.raises(NotImplementedError, match="StaticLayer"):
        llama(random_tokens(1, 12), past_key_values=cache)


def test_custom_masks_are_refused(llama, random_tokens, press):
    ids = random_tokens(1, 12)
    with press(llama), pytest.raises(NotImplementedError, match="2-D attention mask"):
        llama(ids, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool))


def small(config_class, **options):
    return config_class(vocab_size=50, num_hidden_layers=2, **options)


@pytest.mark.parametrize(
    "build, reason",
    [
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "encoder-decoder",
        ),
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)),
            "RoPE|rotary|attention module",
        ),
        (
            lambda: MistralForCausalLM(
                small(
                    MistralConfig,
                    hidden_size=16,
                    intermediate_size=16,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    sliding_window=8,
                )
            ),
            "sliding window",
        ),
    ],
)
def test_models_that_a_press_would_get_wrong_are_refused(build, reason, press):
    model = build().eval()
    before = fingerprint(model)
    with pytest.raises(UnsupportedModel, match=reason):
        press(model)
    assert fingerprint(model) == before


def test_a_model_in_training_mode_is_refused(llama, press):
    with pytest.raises(UnsupportedModel, match="eval"):
        press(llama.train())


def test_not_a_model(press):
    with pytest.raises(TypeError, match="PreTrainedModel"):
        press(torch.nn.Linear(2, 2))


def test_statistics_of_another_model_are_refused_before_anything_runs(llama, random_tokens, shaped_topk):
    from kvstitch.scorers import TriAttention, TriAttentionStatistics
    from kvstitch.views import Needs

    press = EvictionPress(TriAttention(), shaped_topk(), budget=12, interval=5)
    with press(llama) as run:
        generate(llama, random_tokens(1, 40))
    running = [run._cache.layers[i].query_memory.statistics() for i in range(4)]
    own = TriAttentionStatistics.from_running(running, run._facts.rotary, model="tiny", dtype="float32")
    assert Needs(statistics=True, rotary=True) == TriAttention().needs
    with EvictionPress(TriAttention(statistics=own), shaped_topk(), budget=12, interval=5)(llama) as run:
        generate(llama, random_tokens(1, 40))
    assert run.num_events >= 2
    other = TriAttentionStatistics.from_running(running[:3], run._facts.rotary, model="tiny", dtype="float32")
    with pytest.raises(ValueError, match="3 layers.*calibrate this model"):
        EvictionPress(TriAttention(statistics=other), shaped_topk(), budget=12)(llama)
