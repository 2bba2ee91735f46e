"""Static eviction in batches: a row shorter than its budget is what it is alone."""

import pytest
import torch

from kvstitch.allocators.retrieval import GraphEviction
from kvstitch.presses.retrieval import RetrievalPress

GREEDY = dict(do_sample=False, suppress_tokens=[0], return_dict_in_generate=True, output_logits=True)
PRESS = RetrievalPress(GraphEviction(top_k=3), 20, num_sinks=2, num_recent=4)


def logits_of(model, ids, mask, press=PRESS):
    with press(model):
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, **GREEDY)
    return torch.stack(out.logits, dim=1)


@pytest.mark.parametrize("short", [8, 19, 3, 1])
def test_nothing_attends_to_what_lies_under_the_padding(llama, left_padded, short):
    ids, mask, _ = left_padded([60, short])
    other = ids.masked_fill(mask == 0, 77)
    assert torch.equal(logits_of(llama, ids, mask)[1], logits_of(llama, other, mask)[1])


@pytest.mark.filterwarnings("ignore:kvstitch. .* tokens fit the budget")
@pytest.mark.parametrize("short", [8, 19, 3])
def test_a_short_row_is_its_own_single_run(llama, left_padded, short):
    """It fills its budget with what it decodes, as alone, and is evicted from afterwards."""
    ids, mask, rows = left_padded([60, short])
    batch = logits_of(llama, ids, mask)
    for row, single in enumerate(rows):
        assert (batch[row] - logits_of(llama, single, torch.ones_like(single))[0]).abs().max() < 1e-4


def test_reads_fill_the_budget_and_repeat_nothing(llama, left_padded):
    lengths, reads = [60, 8, 30], []
    ids, mask, _ = left_padded(lengths)
    press = RetrievalPress(PRESS.allocator, 20, num_sinks=2, num_recent=4, on_read=reads.append)
    logits_of(llama, ids, mask, press)
    for read in reads:
        for row, length in enumerate(lengths):
            now = length + read.seen_tokens - 60
            for positions in read.positions[row].tolist():
                real = [position for position in positions if position >= 0]
                assert len(real) == len(set(real)) == min(20, now)
                assert set(range(now - 4, now)) | {0, 1} <= set(real)
