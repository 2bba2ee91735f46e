"""Each row of a left-padded batch gives what the row gives alone."""

import pytest
import torch

from kvstitch.presses import EvictionPress


@pytest.mark.parametrize("budget", [12, 0.4])
@pytest.mark.parametrize("compress_prompt", [False, True])
@pytest.mark.parametrize("lengths", [[30, 19], [33, 7, 21]])
def test_row_of_a_padded_batch_is_its_own_single_run(
    model, left_padded, key_hash, shaped_topk, budget, compress_prompt, lengths
):
    """Row 7 is shorter than the budget at the first event."""
    ids, mask, rows = left_padded(lengths)
    press = EvictionPress(key_hash, shaped_topk(), budget=budget, interval=5, compress_prompt=compress_prompt)
    with press(model) as run:
        batch = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=26, do_sample=False)
    assert run.num_events >= 3
    for row, single in enumerate(rows):
        with press(model):
            alone = model.generate(
                input_ids=single, attention_mask=torch.ones_like(single), max_new_tokens=26, do_sample=False
            )
        assert torch.equal(batch[row, -26:], alone[0, -26:]), f"row {row}"


def test_positions_are_the_rows_own(llama, left_padded, key_hash, shaped_topk):
    ids, mask, rows = left_padded([30, 19])
    press = EvictionPress(key_hash, shaped_topk(), budget=10, interval=5, compress_prompt=True)
    with press(llama) as run:
        llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    together = [run.positions(layer) for layer in range(4)]
    for row, single in enumerate(rows):
        with press(llama) as run:
            llama.generate(input_ids=single, attention_mask=torch.ones_like(single), max_new_tokens=12, do_sample=False)
        for layer in range(4):
            assert torch.equal(run.positions(layer)[0], together[layer][row])
