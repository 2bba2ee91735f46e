"""What a press keeps about a row goes wherever the row goes: through beams, batch operations, other requests, a reset."""

import copy

import pytest
import torch
from transformers import DynamicCache

from kvstitch.allocators import GlobalTopK, HeadAdaptive, SegmentQuota
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TOVA, SnapKV, TriAttention

FEW = dict(num_sinks=1, num_recent=2)
# Half of the mass is credit, so that a row with another row's credit keeps other slots.
SEGMENTS = SegmentQuota(**FEW, min_segment_tokens=2, max_segment_tokens=8, window_tokens=4, credit_mix=0.5)
PARTS = {
    "tova+segments": (TOVA(), SEGMENTS),
    "triattention+topk": (TriAttention(), GlobalTopK(**FEW)),
    "triattention+segments": (TriAttention(), SEGMENTS),
    "snapkv+ragged": (SnapKV(window_size=4), HeadAdaptive(**FEW)),
    "snapkv+mask": (SnapKV(window_size=4), HeadAdaptive(**FEW, mode="mask")),
}


def make_press(name):
    scorer, allocator = PARTS[name]
    return EvictionPress(scorer, allocator, budget=14, interval=4, compress_prompt=True)


@pytest.fixture(params=PARTS)
def press(request):
    return make_press(request.param)


@pytest.fixture(params=["triattention+segments", "snapkv+ragged", "snapkv+mask"])
def one_of_a_kind(request):
    """Sums, queries and credit; unequal heads; hidden slots."""
    return make_press(request.param)


def feed(model, cache, ids):
    """Logits `[B, N, V]` after each token, all fed one by one."""
    with torch.no_grad():
        steps = [model(token, past_key_values=cache, use_cache=True).logits for token in ids.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def start(model, ids, prompt):
    """A cache and the logits `[B, 1 + N, V]` after the prompt and after each later token."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(ids[:, :prompt], past_key_values=cache, use_cache=True).logits[:, -1:]
    return cache, torch.cat((first, feed(model, cache, ids[:, prompt:])), dim=1)


def test_every_beam_scores_as_its_sequence_alone(llama, random_tokens, press):
    """Beams are copied, dropped and reordered between events; each that comes out had its own slots and state."""
    ids = random_tokens(2, 24, seed=3)
    with press(llama) as run:
        out = llama.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=17,
            num_beams=4,
            num_return_sequences=2,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    assert run.num_events >= 3
    # Beams did change places, or nothing was tested.
    assert (out.beam_indices[:, :-1].diff(dim=1) != 0).any()
    scores = llama.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    for row, sequence in enumerate(out.sequences):
        with press(llama) as alone:
            _, logits = start(llama, sequence[None, :-1], prompt=24)
        expected = logits[0].log_softmax(-1).gather(1, sequence[24:, None])[:, 0]
        assert (scores[row] - expected).abs().max() < 1e-4, f"sequence {row}"
        assert alone.num_events == run.num_events


def test_requests_do_not_depend_on_their_order(llama, random_tokens, one_of_a_kind):
    a, b = random_tokens(1, 21, seed=1), random_tokens(1, 34, seed=2)

    def generate(ids):
        return llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)

    with one_of_a_kind(llama) as run:
        first = [generate(a), generate(b)]
    assert run.num_events >= 6
    with one_of_a_kind(llama):
        second = [generate(b), generate(a), generate(a)]
    assert torch.equal(first[0], second[1]) and torch.equal(first[0], second[2])
    assert torch.equal(first[1], second[0])


OPERATIONS = {
    "reorder_cache": (torch.tensor([2, 0, 2]), [2, 0, 2]),
    "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
    "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
}


def contents(layer):
    """Every tensor of a layer that has one entry a row, by name."""
    held = {"keys": layer.keys, "values": layer.values, "positions": layer.positions}
    if layer.bias is not None:
        held["bias"] = layer.bias
    held |= {f"state {name}": tensor for name, tensor in layer.slot_state.items()}
    window, statistics = layer.query_memory.window(), layer.query_memory.statistics()
    if window is not None:
        held |= {"queries": window.rotated, "query positions": window.positions}
    if statistics is not None:
        held |= vars(statistics)
    return {name: tensor.clone() for name, tensor in held.items()}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_batch_operation_moves_all_that_a_layer_holds(llama, random_tokens, one_of_a_kind, operation):
    argument, rows = OPERATIONS[operation]
    with one_of_a_kind(llama) as run:
        cache, _ = start(llama, random_tokens(3, 33), prompt=24)
        assert run.num_events >= 2
        before = [contents(layer) for layer in cache.layers]
        getattr(cache, operation)(argument)
        for layer, old in zip(cache.layers, before):
            new = contents(layer)
            assert new.keys() == old.keys()
            for name, tensor in old.items():
                assert torch.equal(new[name], tensor[rows]), name
                # The rows did differ before, unless what differs is elsewhere (positions of the queries, counts).
                if name not in ("query positions", "count", "bias"):
                    assert not torch.equal(tensor[0], tensor[2]), name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_moved_row_goes_on_as_it_would_have(llama, random_tokens, one_of_a_kind, operation):
    """Three more events after the operation, against the rows as they were."""
    argument, rows = OPERATIONS[operation]
    ids = random_tokens(3, 47)
    with one_of_a_kind(llama) as run:
        cache, _ = start(llama, ids[:, :33], prompt=24)
        twin = copy.deepcopy(cache)
        done = len(run.events)
        expected = feed(llama, twin, ids[:, 33:])
        undisturbed = run.events[done:]
        getattr(cache, operation)(argument)
        done = len(run.events)
        moved = feed(llama, cache, ids[rows, 33:])
        disturbed = run.events[done:]
    assert len(disturbed) == len(undisturbed) >= 3
    assert (moved - expected[rows]).abs().max() < 1e-4
    for ours, theirs in zip(disturbed, undisturbed):
        for layer, other in zip(ours.layers, theirs.layers):
            width = layer.positions.shape[2]
            assert torch.equal(layer.positions, other.positions[rows, :, :width])
            assert (other.positions[rows, :, width:] < 0).all()


def test_a_reset_cache_is_as_good_as_new(llama, random_tokens, one_of_a_kind):
    """Another batch size, another prompt: nothing of the first request is left, its place in the interval included."""
    ids = random_tokens(1, 40, seed=7)
    with one_of_a_kind(llama) as run:
        _, expected = start(llama, ids, prompt=24)
        fresh, fresh_stored = list(run.events), run.stored_tokens
        cache, _ = start(llama, random_tokens(2, 31), prompt=22)
        cache.reset()
        assert cache.get_seq_length() == 0 and run.stored_bytes == 0
        done = len(run.events)
        with torch.no_grad():
            first = llama(ids[:, :24], past_key_values=cache, use_cache=True).logits[:, -1:]
        logits = torch.cat((first, feed(llama, cache, ids[:, 24:])), dim=1)
        again = run.events[done:]
    assert torch.equal(logits, expected)
    assert run.stored_tokens == fresh_stored
    facts = [(event.index, event.seen_tokens, event.reason) for event in again]
    assert facts == [(event.index, event.seen_tokens, event.reason) for event in fresh]
    assert facts[0] == (0, 24, "prompt") and len(facts) >= 4
    for ours, theirs in zip(again, fresh):
        for layer, other in zip(ours.layers, theirs.layers):
            assert torch.equal(layer.positions, other.positions)
