"""Drawn combinations of model, scorer, allocator, padding, budget and use: each against the dense model with the evicted keys
masked, and each row or beam against a run of its own. The seed of a case is its name."""

import random
import warnings

import pytest
import torch
from transformers import DynamicCache

from kvstitch.allocators import (
    CommunityQuota,
    FixedSegments,
    GlobalTopK,
    HeadAdaptive,
    Pyramid,
    SegmentQuota,
)
from kvstitch.presses import EvictionPress
from kvstitch.scorers import RKV, TOVA, ExpectedAttention, KeyDiff, SnapKV, StreamingLLM, TriAttention

MODELS = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3")
SCORERS = (
    TOVA(), TOVA(share="group"), SnapKV(window_size=4), RKV(), ExpectedAttention(num_future_positions=16), TriAttention(),
    KeyDiff(), StreamingLLM(),
)  # fmt: skip
NEW = 20


def draw_allocator(draw):
    few = dict(num_sinks=draw.choice([0, 1, 2]), num_recent=draw.choice([0, 1, 3]))
    segments = dict(min_segment_tokens=2, max_segment_tokens=8, window_tokens=4, window_step=1)
    communities = dict(window_tokens=6, top_k=2, target_tokens=3, run_tokens=3, min_mean_tokens=1)
    return draw.choice(
        [
            GlobalTopK(**few),
            SegmentQuota(**few, **segments),
            HeadAdaptive(**few),
            HeadAdaptive(**few, mode="mask"),
            FixedSegments(**few, segment_tokens=4),
            Pyramid(allocator=GlobalTopK(**few)),
            CommunityQuota(**few, **communities),
        ]
    )


@pytest.fixture
def case(request, make_model, left_padded):
    """(draw, model, press, ids, mask, rows, lengths) of a seed."""
    seed = request.param
    draw = random.Random(seed)
    # Every model comes, whatever is drawn.
    model = make_model(MODELS[seed % len(MODELS)])
    scorer, allocator = draw.choice(SCORERS), draw_allocator(draw)
    lengths = [draw.choice([1, 2, 5, 9, 17, 26, 31]) for _ in range(draw.choice([2, 3, 4]))]
    ids, mask, rows = left_padded(lengths, seed=seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        budget, interval = draw.choice([5, 8, 12, 20, 0.2, 0.5, 0.9]), draw.choice([1, 2, 3, 5, 8])
        press = EvictionPress(scorer, allocator, budget, interval=interval, compress_prompt=draw.random() < 0.5)
        yield draw, model, press, ids, mask, rows, lengths


def seeds(first, count):
    return pytest.mark.parametrize("case", range(first, first + count), indirect=True, ids=str)


@seeds(0, 6)
@pytest.mark.parametrize("sampled", [False, True])
def test_generate_is_the_dense_model_with_evicted_keys_masked(case, sampled, gold_logits):
    _, model, press, ids, mask, *_ = case
    options = dict(do_sample=True, num_return_sequences=2) if sampled else dict(do_sample=False)
    options |= dict(max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True)
    with press(model) as run:
        out = model.generate(input_ids=ids, attention_mask=mask, **options)
    mask = mask.repeat_interleave(2, 0) if sampled else mask
    whole = torch.cat((mask, mask.new_ones(len(mask), NEW)), 1)
    gold = gold_logits(model, out.sequences, whole, run.events)[:, ids.shape[1] - 1 : -1]
    assert (torch.stack(out.logits, 1) - gold).abs().max() < 2e-4


@seeds(100, 6)
def test_chunks_of_any_size_with_padding(case, gold_logits, random_tokens):
    draw, model, press, ids, mask, rows, _ = case
    width = ids.shape[1]
    ids = torch.cat((ids, random_tokens(len(rows), 16, seed=99)), 1)
    whole = torch.cat((mask, mask.new_ones(len(rows), 16)), 1)
    sizes, cache, logits, start = [], DynamicCache(config=model.config), [], 0
    for length, choices in ((width, (1, 2, 3, 7, 11)), (16, (1, 1, 1, 1, 4))):
        while length:
            sizes.append(min(length, draw.choice(choices)))
            length -= sizes[-1]
    with press(model) as run, torch.no_grad():
        for size in sizes:
            part, start = slice(start, start + size), start + size
            logits.append(model(ids[:, part], attention_mask=whole[:, :start], past_key_values=cache).logits)
    gold = gold_logits(model, ids, whole, run.events)
    real = whole.bool()
    assert (torch.cat(logits, 1)[real] - gold[real]).abs().max() < 2e-4


@seeds(200, 6)
def test_a_second_turn_with_more_text(case, gold_logits, random_tokens):
    draw, model, press, ids, mask, rows, _ = case
    cache, options = DynamicCache(config=model.config), dict(max_new_tokens=9, do_sample=False)
    with press(model) as run:
        first = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
        again = torch.cat((first, random_tokens(len(rows), draw.choice([1, 2, 9]), seed=5)), 1)
        longer = torch.cat((mask, mask.new_ones(len(rows), again.shape[1] - mask.shape[1])), 1)
        options |= dict(return_dict_in_generate=True, output_logits=True)
        out = model.generate(input_ids=again, attention_mask=longer, past_key_values=cache, **options)
    whole = torch.cat((longer, longer.new_ones(len(rows), 9)), 1)
    gold = gold_logits(model, out.sequences, whole, run.events)[:, again.shape[1] - 1 : -1]
    assert (torch.stack(out.logits, 1) - gold).abs().max() < 2e-4


def alone(model, press, sequence, prompt):
    """Logits `[N, V]` after the prompt and each later token but the last, one row, token by token."""
    with press(model), torch.no_grad():
        out = model(sequence[:, :prompt], use_cache=True)
        logits = [out.logits[:, -1:]]
        for at in range(prompt, sequence.shape[1] - 1):
            out = model(sequence[:, at : at + 1], past_key_values=out.past_key_values)
            logits.append(out.logits)
    return torch.cat(logits, 1)[0]


@seeds(300, 6)
def test_each_row_is_its_own_run(case):
    _, model, press, ids, mask, _, lengths = case
    options = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with press(model):
        out = model.generate(input_ids=ids, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        sequence = out.sequences[row : row + 1, -NEW - length :]
        assert (alone(model, press, sequence, length) - torch.stack(out.logits, 1)[row]).abs().max() < 2e-4


@seeds(400, 6)
def test_each_beam_is_its_own_run(case):
    _, model, press, ids, mask, _, lengths = case
    options = dict(max_new_tokens=12, num_beams=3, num_return_sequences=2, do_sample=False)
    with press(model):
        out = model.generate(
            input_ids=ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options
        )
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    for beam in range(len(out.sequences)):
        length = lengths[beam // 2]
        sequence = out.sequences[beam : beam + 1, ids.shape[1] - length :]
        own = alone(model, press, sequence, length).log_softmax(-1).gather(1, sequence[0, length:, None])[:, 0]
        assert (own - scores[beam]).abs().max() < 1e-3
