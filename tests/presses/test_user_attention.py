"""The attention function that the user chose does the work wherever a press has nothing to change."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvstitch.allocators import GlobalTopK
from kvstitch.presses import EvictionPress
from kvstitch.scorers import KeyDiff

NAME = "counted"


@pytest.fixture
def counted():
    """A registered attention function that does what sdpa does, and the calls of it as (layer, query tokens, mask)."""
    calls = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        calls.append((module.layer_idx, query.shape[2], attention_mask is not None))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    yield calls
    AttentionInterface._global_mapping.pop(NAME)
    AttentionMaskInterface._global_mapping.pop(NAME)


@pytest.fixture
def press():
    return EvictionPress(KeyDiff(), GlobalTopK(num_sinks=1, num_recent=1), budget=12, interval=6, compress_prompt=True)


@pytest.mark.parametrize("padding", [0, 5])
def test_a_prompt_goes_to_the_users_function_and_decoding_does_not(llama, random_tokens, counted, press, padding):
    llama.set_attn_implementation(NAME)
    ids, mask = random_tokens(2, 24), torch.ones(2, 24, dtype=torch.int64)
    mask[1, :padding] = 0
    with press(llama) as run:
        out = llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert run.num_events >= 2
    assert counted == [(layer, 24, padding > 0) for layer in range(4)]
    llama.set_attn_implementation("sdpa")
    with press(llama):
        expected = llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(out, expected)


def test_every_chunk_of_a_prompt_goes_there_until_the_first_event(llama, random_tokens, counted, press):
    llama.set_attn_implementation(NAME)
    ids = random_tokens(1, 40)
    with press(llama) as run, torch.no_grad():
        cache = llama(ids[:, :11], use_cache=True).past_key_values
        llama(ids[:, 11:24], past_key_values=cache, use_cache=True)
        assert [count for _, count, _ in counted] == [11] * 4 + [13] * 4
        llama(ids[:, 24:25], past_key_values=cache, use_cache=True)
        assert run.num_events == 1
        # Slots are no longer positions: the causal mask of the user's function would be wrong here.
        llama(ids[:, 25:33], past_key_values=cache, use_cache=True)
    assert len(counted) == 8


@pytest.mark.filterwarnings("ignore:.*sliding window")
def test_sliding_layers_stay_with_it_throughout(make_model, random_tokens, counted, press):
    model = make_model("gemma3")
    model.set_attn_implementation(NAME)
    ids = random_tokens(1, 24)
    with press(model):
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    assert [layer for layer, count, _ in counted if count == 24] == [0, 1, 2, 3]
    assert [layer for layer, count, _ in counted if count == 1] == [0, 2] * 9


def test_outside_the_block_all_is_the_users_again(llama, random_tokens, counted, press):
    llama.set_attn_implementation(NAME)
    with press(llama):
        pass
    assert llama.config._attn_implementation == NAME
    with torch.no_grad():
        cache = llama(random_tokens(1, 9), use_cache=True).past_key_values
        llama(random_tokens(1, 1), past_key_values=cache, use_cache=True)
    assert [count for _, count, _ in counted] == [9] * 4 + [1] * 4
