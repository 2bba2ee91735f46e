"""Caches and models that cannot be compacted are named and refused before any layer runs."""

import warnings

import pytest
import torch
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
)
from transformers.cache_utils import QuantizedLayer

from kvstitch.allocators import GlobalTopK
from kvstitch.allocators.retrieval import PageRetrieval
from kvstitch.presses import EvictionPress, RetrievalPress, UnsupportedModel
from kvstitch.scorers import TOVA


class PlainQuantizedLayer(QuantizedLayer):
    """Quantised in name: the real ones need packages of their own."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def quantized(model):
    return Cache(layers=[PlainQuantizedLayer() for _ in range(4)])


def offloaded(model):
    cache = DynamicCache(config=model.config)
    # What `offloading=True` sets, without the stream of a GPU that it asks for.
    cache.offloading = True
    return cache


def encoder_decoder(model):
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


@pytest.fixture
def press():
    return EvictionPress(TOVA(), GlobalTopK(num_sinks=1, num_recent=1), budget=12, interval=6)


@pytest.fixture
def ran(llama):
    """Layers of the model that have run."""
    layers = []
    for module in llama.model.layers:
        module.register_forward_pre_hook(lambda *_: layers.append(1))
    return layers


@pytest.mark.parametrize(
    "build, message",
    [
        (quantized, "quantised.*got PlainQuantizedLayer"),
        (offloaded, "does not support offloaded caches"),
        (encoder_decoder, "encoder-decoder caches cannot be compacted, got EncoderDecoderCache"),
    ],
)
def test_caches(llama, random_tokens, press, ran, build, message):
    ids = random_tokens(1, 12)
    with press(llama):
        with pytest.raises(NotImplementedError, match=message):
            llama(ids, past_key_values=build(llama), use_cache=True)
        with pytest.raises(NotImplementedError, match=message):
            llama.generate(input_ids=ids, past_key_values=build(llama), max_new_tokens=3)
        assert not ran
        # The model is as useful as before.
        llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    assert ran


@pytest.mark.parametrize("name", ["quantized", "offloaded", "static", "offloaded_static"])
def test_cache_implementations_by_name(llama, random_tokens, press, ran, name):
    with press(llama), pytest.raises(NotImplementedError, match=f"cache_implementation='{name}'.*leave it out"):
        llama.generate(input_ids=random_tokens(1, 12), cache_implementation=name, max_new_tokens=3)
    llama.generation_config.cache_implementation = name
    with press(llama), pytest.raises(NotImplementedError, match=f"cache_implementation='{name}'.*leave it out"):
        llama.generate(input_ids=random_tokens(1, 12), max_new_tokens=3)
    assert not ran


def test_encoder_decoder_models(press):
    """One with RoPE and with caches of the usual kind, so that nothing but its being two models stands in the way."""
    module = dict(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    config = T5GemmaConfig(encoder=T5GemmaModuleConfig(**module), decoder=T5GemmaModuleConfig(**module), vocab_size=50)
    model = T5GemmaForConditionalGeneration(config).eval()
    attributes = set(vars(model))
    with pytest.raises(UnsupportedModel, match="T5GemmaForConditionalGeneration is an encoder-decoder model"):
        press(model)
    assert set(vars(model)) == attributes


def test_a_recent_window_that_fills_the_budget_is_named():
    with pytest.warns(UserWarning, match="4 sinks and 32 recent tokens .* fill the 36 slots of `budget`=36 tokens"):
        EvictionPress(TOVA(), GlobalTopK(), 36)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EvictionPress(TOVA(), GlobalTopK(), 37)


@pytest.mark.parametrize("value", ["abc", "false", 3, 0, None, [True]])
def test_switches_are_true_or_false(value):
    """A word is true to Python, `false` written wrongly, too."""
    for name in ("compress_prompt", "record_events"):
        with pytest.raises(TypeError, match=f"`{name}` must be a bool, got "):
            EvictionPress(TOVA(), GlobalTopK(), 64, **{name: value})
    for name in ("record_events", "measure_mass"):
        with pytest.raises(TypeError, match=f"`{name}` must be a bool, got "):
            RetrievalPress(PageRetrieval(), 64, **{name: value})
