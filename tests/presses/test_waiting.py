"""A row about which the scorer knows too little is passed over; its neighbours in the batch are compacted on time."""

import pytest
import torch
from transformers import DynamicCache

from kvstitch.allocators import CommunityQuota, GlobalTopK, HeadAdaptive, Pyramid, SegmentQuota
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TriAttention

FEW = dict(num_sinks=1, num_recent=2)
ALLOCATORS = {
    "topk": GlobalTopK(**FEW),
    "segments": SegmentQuota(**FEW, min_segment_tokens=2, max_segment_tokens=8, window_tokens=4),
    "ragged": HeadAdaptive(**FEW),
    "mask": HeadAdaptive(**FEW, mode="mask"),
    "pyramid": Pyramid(allocator=GlobalTopK(**FEW)),
    "communities": CommunityQuota(**FEW, window_tokens=6, top_k=2, target_tokens=3, run_tokens=3, min_mean_tokens=1),
}
LENGTHS, BUDGET, INTERVAL = [31, 11, 19], 8, 4


def generate(model, press, ids, mask):
    with press(model) as run:
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=25, do_sample=False)
    return run, out[:, ids.shape[1] :]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_each_row_of_a_batch_is_its_own_single_run(llama, left_padded, name):
    ids, mask, rows = left_padded(LENGTHS)
    press = EvictionPress(TriAttention(), ALLOCATORS[name], BUDGET, interval=INTERVAL, compress_prompt=True)
    run, tokens = generate(llama, press, ids, mask)
    # The prompt of 31 is compacted at once; 19 tokens, of which 15 count, and 11 tokens are not.
    assert run.events[0].seen_tokens == 31
    held = [(event.layers[0].positions >= 0).sum(-1).amax(1).tolist() for event in run.events]
    assert held[0][1:] == [11, 19] and held[0][0] < 31
    for row, single in enumerate(rows):
        alone, expected = generate(llama, press, single, torch.ones_like(single))
        assert torch.equal(tokens[row], expected[0]), f"row {row}"
        # What is due is due at the same tokens, waiting or not.
        assert {event.seen_tokens - LENGTHS[row] for event in alone.events} <= {e.seen_tokens - 31 for e in run.events}


def test_a_waiting_row_takes_its_turn_at_the_next_event(llama, left_padded):
    ids, mask, _ = left_padded([31, 11])
    press = EvictionPress(TriAttention(), GlobalTopK(**FEW), BUDGET, interval=INTERVAL, compress_prompt=True)
    run, _ = generate(llama, press, ids, mask)
    held = [(event.layers[0].positions[:, 0] >= 0).sum(-1).tolist() for event in run.events[:4]]
    # After 4 and 8 more tokens the second row has 15 and 19, after 12 more 23, of which 19 count.
    assert held == [[8, 11], [8, 15], [8, 19], [8, 8]]


def test_queries_count_and_not_tokens(llama, random_tokens):
    """A cache that was filled before the press has many tokens and no query yet."""
    ids, cache = random_tokens(1, 70), DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(ids[:, :40], past_key_values=cache, use_cache=True)
        with EvictionPress(TriAttention(), GlobalTopK(**FEW), 20, interval=5)(llama) as run:
            for token in ids[:, 40:].split(1, dim=1):
                llama(token, past_key_values=cache, use_cache=True)
                count = int(run.layers[0].query_memory.statistics().count)
                assert run.num_events == 0 or count > 16
    assert run.num_events >= 1 and run.stored_tokens[0] <= 25
