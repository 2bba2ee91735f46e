"""AdaKV through a press: hiding what a head drops gives what giving it back gives, and only the latter frees memory."""

import pytest
import torch

from kvstitch.allocators import HeadAdaptive
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TOVA, SnapKV

BUDGET = 12
SCORERS = {"tova": TOVA(share="group"), "snapkv": SnapKV(window_size=4)}


def make_press(scorer, mode, **options):
    allocator = HeadAdaptive(mode=mode, num_sinks=1, num_recent=2)
    return EvictionPress(SCORERS[scorer], allocator, BUDGET, interval=6, compress_prompt=True, **options)


def storages(run):
    """Bytes behind the keys and values of all layers, each storage once."""
    tensors = [tensor for layer in run.layers.values() for tensor in (layer.keys, layer.values)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def visible(positions):
    """Positions that may be attended to, `[row][head]`."""
    return [[head[head >= 0].tolist() for head in row] for row in positions]


@pytest.mark.parametrize("scorer", SCORERS)
def test_hidden_is_as_good_as_gone(model, left_padded, scorer):
    ids, mask, _ = left_padded([30, 22])
    results = []
    for mode in ("mask", "ragged"):
        with make_press(scorer, mode)(model) as run:
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=26,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        results.append((out.sequences, torch.stack(out.logits, 1), run))
    (tokens, logits, masked), (expected_tokens, expected_logits, ragged) = results
    assert masked.num_events == ragged.num_events >= 3
    assert torch.equal(tokens, expected_tokens)
    assert (logits - expected_logits).abs().max() < 1e-5 * expected_logits.abs().max().clamp(min=1)
    counts = set()
    for ours, theirs in zip(masked.events, ragged.events):
        for layer, other in zip(ours.layers, theirs.layers):
            assert visible(layer.positions) == visible(other.positions)
            counts |= {len(head) for row in visible(layer.positions) for head in row}
    assert len(counts) > 1, "heads differ, or both are a plain top-k"


def test_hiding_touches_no_key_and_frees_nothing(llama, random_tokens):
    stored = []
    before = []

    def note(event):
        for layer, (keys, values) in zip(run.layers.values(), before):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        stored.append((event.seen_tokens, run.stored_tokens, storages(run)))

    ids = random_tokens(2, 50)
    with make_press("snapkv", "mask", on_event=note)(llama) as run, torch.no_grad():
        cache = llama(ids[:, :30], use_cache=True).past_key_values
        for token in ids[:, 30:].split(1, dim=1):
            before[:] = [(layer.keys.clone(), layer.values.clone()) for layer in run.layers.values()]
            llama(token, past_key_values=cache, use_cache=True)
    assert [seen for seen, *_ in stored] == [30, 36, 42, 48]
    for seen, slots, held in stored:
        assert slots == [seen] * 4
        # layers, keys and values, rows, kv heads, head dim, bytes of a float32
        assert held == 4 * 2 * 2 * 2 * seen * 16 * 4
    assert run.stored_bytes == storages(run)


def test_giving_back_frees_what_no_head_of_a_layer_holds(llama, random_tokens):
    ids = random_tokens(2, 50)
    with make_press("snapkv", "ragged")(llama) as run, torch.no_grad():
        cache = llama(ids[:, :30], use_cache=True).past_key_values
        for step, token in enumerate(ids[:, 30:].split(1, dim=1)):
            before = storages(run)
            llama(token, past_key_values=cache, use_cache=True)
            if step == 0:
                assert storages(run) < before
        before = storages(run)
        run.compact()
    assert run.num_events >= 4
    widest = [max(len(head) for row in visible(layer.positions) for head in row) for layer in run.layers.values()]
    assert run.stored_tokens == widest and max(widest) < 2 * BUDGET
    assert storages(run) == run.stored_bytes == sum(2 * 2 * 2 * width * 16 * 4 for width in widest) < before
    kept = sum(len(head) for layer in run.layers.values() for row in visible(layer.positions) for head in row)
    assert kept == 4 * 2 * 2 * BUDGET
