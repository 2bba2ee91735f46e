"""A press against a dense run: nothing dropped is nothing changed, and what is dropped is exactly what is masked out."""

import pytest
import torch

from kvstitch.presses import EvictionPress

GREEDY = dict(do_sample=False, return_dict_in_generate=True, output_logits=True)


def stack(output):
    return torch.stack(output.logits, dim=1)


def extend(mask, length):
    return torch.cat((mask, mask.new_ones(mask.shape[0], length - mask.shape[1])), dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_dropped_gives_the_dense_run(model, left_padded, key_hash, shaped_topk, attention):
    model.set_attn_implementation(attention)
    ids, mask, _ = left_padded([30, 21])
    dense = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, **GREEDY)
    with EvictionPress(key_hash, shaped_topk(), budget=500, interval=4)(model) as run:
        pressed = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, **GREEDY)
    assert torch.equal(pressed.sequences, dense.sequences)
    assert (stack(pressed) - stack(dense)).abs().max() < 1e-4
    assert not run.bound and run.seen_tokens == 53


@pytest.mark.parametrize("shape", ["equal", "per_layer", "ragged"])
@pytest.mark.parametrize("compress_prompt", [False, True])
def test_dropped_slots_are_exactly_the_masked_ones(
    model, left_padded, key_hash, shaped_topk, gold_logits, shape, compress_prompt
):
    ids, mask, _ = left_padded([30, 23])
    press = EvictionPress(key_hash, shaped_topk(shape=shape), budget=14, interval=6, compress_prompt=compress_prompt)
    with press(model) as run:
        pressed = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32, **GREEDY)
    assert len(run.events) >= 3 + compress_prompt
    full = extend(mask, pressed.sequences.shape[1])
    gold = gold_logits(model, pressed.sequences, full, run.events)[:, 29:-1]
    assert (stack(pressed) - gold).abs().max() < 1e-4
    # The test can fail: without the evictions the same tokens give other logits.
    dense = gold_logits(model, pressed.sequences, full, [])[:, 29:-1]
    assert (dense - gold).abs().max() > 0.05


@pytest.mark.parametrize("shape", ["equal", "ragged"])
def test_hand_written_loop_and_chunks(model, random_tokens, key_hash, shaped_topk, gold_logits, shape):
    """No position_ids, no mask, no cache argument; single tokens, then a chunk of 13 over compacted slots."""
    ids = random_tokens(2, 60)
    press = EvictionPress(key_hash, shaped_topk(shape=shape), budget=12, interval=5, compress_prompt=True)
    pieces = [25, *[1] * 17, 13, *[1] * 5]
    cache, logits, start = None, [], 0
    with press(model) as run, torch.no_grad():
        for size in pieces:
            out = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + size
            logits.append(out.logits)
    assert start == 60 and len(run.events) >= 4
    gold = gold_logits(model, ids, torch.ones_like(ids), run.events)
    assert (torch.cat(logits, dim=1) - gold).abs().max() < 1e-4


def test_chunked_prefill_is_the_whole_prefill(model, random_tokens, key_hash, shaped_topk, gold_logits):
    ids = random_tokens(2, 44)
    press = EvictionPress(key_hash, shaped_topk(), budget=10, interval=4, compress_prompt=True)
    results = []
    for pieces in ([30], [11, 11, 8]):
        cache, start, logits = None, 0, []
        with press(model) as run, torch.no_grad():
            for size in [*pieces, *[1] * 14]:
                out = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
                cache, start = out.past_key_values, start + size
                logits.append(out.logits)
        gold = gold_logits(model, ids, torch.ones_like(ids), run.events)
        assert (torch.cat(logits, dim=1) - gold).abs().max() < 1e-4
        results.append([event.seen_tokens for event in run.events])
    assert results[0] == results[1] == [30, 34, 38, 42]


@pytest.mark.parametrize("shape", ["equal", "ragged"])
def test_second_generate_on_the_compacted_cache(
    model, left_padded, random_tokens, key_hash, shaped_topk, gold_logits, shape
):
    from transformers import DynamicCache

    ids, mask, _ = left_padded([26, 19])
    cache = DynamicCache(config=model.config)
    press = EvictionPress(key_hash, shaped_topk(shape=shape), budget=12, interval=5, compress_prompt=True)
    with press(model) as run:
        first = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=13, do_sample=False
        )
        again = torch.cat((first, random_tokens(2, 9, seed=5)), dim=1)
        mask = extend(mask, again.shape[1])
        second = model.generate(
            input_ids=again, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **GREEDY
        )
    assert len(run.events) >= 4
    full = extend(mask, second.sequences.shape[1])
    gold = gold_logits(model, second.sequences, full, run.events)[:, again.shape[1] - 1 : -1]
    assert (stack(second) - gold).abs().max() < 1e-4


def test_beams_and_several_sequences(model, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(2, 20)
    options = dict(max_new_tokens=16, num_beams=3, num_return_sequences=2, do_sample=False)
    dense = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    with EvictionPress(key_hash, shaped_topk(), budget=300, interval=4)(model):
        pressed = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(dense, pressed)
    with EvictionPress(key_hash, shaped_topk(shape="ragged"), budget=9, interval=4)(model) as run:
        first = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    with EvictionPress(key_hash, shaped_topk(shape="ragged"), budget=9, interval=4)(model):
        assert torch.equal(first, model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options))
    assert run.num_events >= 3 and first.shape[0] == 4


def test_beam_rows_carry_their_own_slots(llama, random_tokens, key_hash, shaped_topk, gold_logits):
    """Every beam that comes out was scored by the slots of its own history."""
    ids = random_tokens(1, 20)
    with EvictionPress(key_hash, shaped_topk(), budget=9, interval=50, compress_prompt=True)(llama) as run:
        out = llama.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = out.sequences
    gold = gold_logits(llama, sequences, torch.ones_like(sequences), run.events).log_softmax(-1)
    picked = gold[:, 19:-1].gather(2, sequences[:, 20:, None])[..., 0]
    transition = llama.compute_transition_scores(sequences, out.scores, out.beam_indices)
    assert (picked - transition).abs().max() < 1e-3


def test_sampling_with_a_seed_repeats(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 20)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        with EvictionPress(key_hash, shaped_topk(), budget=8, interval=4)(llama):
            outputs.append(
                llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=True)
            )
    assert torch.equal(*outputs)
