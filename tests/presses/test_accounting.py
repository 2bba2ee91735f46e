"""What a run says it stores is what is stored."""

import warnings

import pytest
import torch

from kvstitch.presses import EvictionPress


def decode(model, ids, steps, each_step):
    cache, token = None, ids
    for _ in range(steps):
        with torch.no_grad():
            out = model(token, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        each_step()


@pytest.mark.parametrize("shape", ["equal", "per_layer"])
def test_slots_stay_within_budget_plus_interval(llama, random_tokens, key_hash, shaped_topk, shape):
    press = EvictionPress(key_hash, shaped_topk(shape=shape), budget=12, interval=7)
    history = []
    with press(llama) as run:
        decode(llama, random_tokens(2, 30), 40, lambda: history.append((run.num_events, max(run.stored_tokens))))
    assert run.num_events >= 4
    assert max(stored for events, stored in history if events) <= 12 + 7
    assert max(stored for events, stored in history if not events) == 37 == run.peak_tokens
    assert run.seen_tokens == 30 + 39
    assert 12 < run.mean_tokens < 37


@pytest.mark.parametrize("shape", ["equal", "per_layer"])
def test_bytes_are_those_of_the_kept_slots(llama, random_tokens, key_hash, shaped_topk, shape):
    press = EvictionPress(key_hash, shaped_topk(shape=shape), budget=12, interval=7)
    with press(llama) as run:
        decode(llama, random_tokens(2, 30), 5, lambda: None)
        grown = run.stored_bytes
        run.compact()
        batch, heads, dim, itemsize = 2, 2, 16, 4
        kept = sum(run.stored_tokens)
        assert run.stored_bytes == 2 * batch * heads * kept * dim * itemsize < grown
        tensors = [t for layer in run._cache.layers for t in (layer.keys, layer.values)]
        assert run.stored_bytes == sum(t.untyped_storage().nbytes() for t in tensors)


def test_events_tell_what_was_kept(llama, random_tokens, key_hash, shaped_topk):
    seen = []
    press = EvictionPress(key_hash, shaped_topk(), budget=12, interval=7, compress_prompt=True, on_event=seen.append)
    with press(llama) as run:
        decode(llama, random_tokens(1, 30), 20, lambda: None)
    assert seen == run.events and [event.index for event in seen] == list(range(len(seen)))
    assert [event.reason for event in seen] == ["prompt", "interval", "interval"]
    assert [event.seen_tokens for event in seen] == [30, 37, 44]
    for event in seen:
        assert [layer.layer_idx for layer in event.layers] == [0, 1, 2, 3]
        for layer in event.layers:
            assert layer.slots_after == 12 < layer.slots_before and layer.seconds > 0
            assert layer.positions.shape == (1, 2, 12) and (layer.positions.diff() > 0).all()
            assert int(layer.positions.max()) < event.seen_tokens
    assert "event 1 at 37 tokens (interval): 19 -> 12 slots in 4 layers" in str(seen[1])


def test_events_can_be_left_unrecorded(llama, random_tokens, key_hash, shaped_topk):
    press = EvictionPress(key_hash, shaped_topk(), budget=12, interval=7, record_events=False)
    with press(llama) as run:
        decode(llama, random_tokens(1, 30), 20, lambda: None)
    assert run.events == [] and run.num_events == 2 and run.event_seconds > 0


def test_storage_grows_in_strides(llama, random_tokens, key_hash, shaped_topk):
    """No reallocation at every step: the storage behind the keys changes a handful of times in 300 steps."""
    press = EvictionPress(key_hash, shaped_topk(), budget=400, interval=100)
    pointers = set()
    with press(llama) as run:
        decode(llama, random_tokens(1, 30), 300, lambda: pointers.add(run._cache.layers[0].keys.data_ptr()))
    assert len(pointers) <= 4


def test_a_long_interval_reserves_no_memory(llama, random_tokens, key_hash, shaped_topk):
    with EvictionPress(key_hash, shaped_topk(), budget=400, interval=10**7)(llama) as run:
        decode(llama, random_tokens(1, 30), 3, lambda: None)
    assert run.stored_bytes < 2**20


def test_a_budget_in_bytes(llama, random_tokens, key_hash, shaped_topk):
    per_slot = 4 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head dim, float32
    press = EvictionPress(key_hash, shaped_topk(), budget=f"{per_slot * 11 + 5}B", interval=7)
    with press(llama) as run:
        decode(llama, random_tokens(1, 30), 5, lambda: None)
        run.compact()
    assert run.stored_tokens == [11] * 4


def test_a_budget_filled_by_what_is_protected_is_said(llama, key_hash, shaped_topk):
    """Before anything runs; in bytes as soon as the model tells what a slot costs."""
    allocator, per_slot = shaped_topk(), 4 * 2 * 2 * 16 * 4
    protected = allocator.num_sinks + allocator.num_recent
    with pytest.warns(UserWarning, match=rf"fill the {protected} slots of `budget`={protected} tokens"):
        EvictionPress(key_hash, allocator, protected)
    press = EvictionPress(key_hash, allocator, f"{per_slot * protected}B")
    with pytest.warns(UserWarning, match=rf"fill the {protected} slots of `budget`={per_slot * protected} bytes"):
        press(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EvictionPress(key_hash, allocator, f"{per_slot * (protected + 1)}B")(llama)
        EvictionPress(key_hash, allocator, protected + 1)(llama)


def test_half_precision_and_bfloat16(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 30)
    for dtype in (torch.bfloat16, torch.float16):
        model = llama.to(dtype)
        with EvictionPress(key_hash, shaped_topk(shape="ragged"), budget=12, interval=7)(model) as run:
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert run.num_events >= 2 and out.shape == (1, 50)
        assert run._cache.layers[0].keys.dtype == dtype
