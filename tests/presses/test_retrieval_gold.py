"""Every decode step against a dense forward in which the query sees exactly the slots that were read."""

import copy

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvstitch.allocators.retrieval import (
    ClusterRetrieval,
    CommunityRetrieval,
    OracleRetrieval,
    PageRetrieval,
    WindowRetrieval,
)
from kvstitch.presses import EvictionPress
from kvstitch.presses.retrieval import RetrievalPress

GREEDY = dict(do_sample=False, return_dict_in_generate=True, output_logits=True)
SINKS, RECENT, BUDGET = 3, 4, 17
# Nothing stands in for what is not read, so that a mask says it all.
PLAIN = dict(top_k=3, replacement=0, refine_steps=0)
ALLOCATORS = {
    "window": WindowRetrieval(),
    "oracle": OracleRetrieval(),
    "oracle_per_head": OracleRetrieval(select="query_head"),
    "pages": PageRetrieval(page_size=4),
    "pages_shared": PageRetrieval(page_size=4, select="kv_head", combine="softmax_sum"),
    "mean_pages": PageRetrieval(page_size=4, select="kv_head", representative="mean", combine="mean"),
    "clusters": ClusterRetrieval(tokens_per_cluster=4, growth_tokens=4),
    "clusters_nearest": ClusterRetrieval(tokens_per_cluster=6, growth="nearest", truncation="exact"),
    "clusters_shortlist": ClusterRetrieval(tokens_per_cluster=6, shortlist=2.0, select="query_head"),
    "community": CommunityRetrieval(**PLAIN, growth_tokens=4, combine="max", truncation="exact"),
    "community_refined": CommunityRetrieval(top_k=3, replacement=0, metric="queries"),
    "community_tree": CommunityRetrieval(**PLAIN, levels=2, growth_tokens=4),
    "community_high_tree": CommunityRetrieval(**PLAIN, levels="auto", growth_tokens=1, shortlist=1.5),
    "community_paper": CommunityRetrieval.paper(top_k=3),
    "community_nearest": CommunityRetrieval(**PLAIN, growth="nearest", truncation="exact", combine="mean"),
    "community_per_head": CommunityRetrieval(**PLAIN, aggregation="per_head", truncation="exact"),
    "community_per_head_paper": CommunityRetrieval.paper(top_k=3, aggregation="per_head"),
    "community_per_layer": CommunityRetrieval(**PLAIN, aggregation="per_layer", select="query_head"),
    "community_refresh": CommunityRetrieval(**PLAIN, refresh=6, growth="delta_q", direct_weight=0.5, resolution=4.0),
    "community_shortlist": CommunityRetrieval(**PLAIN, shortlist=1.5, truncation="recent"),
}


def generate(model, ids, mask, tokens, press, cache=None):
    reads = []
    press = RetrievalPress(
        press.allocator,
        press.budget,
        press.num_sinks,
        press.num_recent,
        press.dense_layers,
        press.scorer,
        on_read=reads.append,
    )
    with press(model) as run:
        output = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=tokens, **GREEDY
        )
    return output, reads, run


def gold_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) * scaling
    allowed = attention_mask.expand(logits.shape) & getattr(module, "gold_visible", torch.tensor(True))
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def full_mask(*args, **kwargs):
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **(kwargs | {"allow_is_causal_skip": False}))


def visible_from(reads, layer_idx, mask, query_heads):
    """`[B, Q, N, N]`: everything, but for queries that a step issued, which see what it read."""
    batch, length = mask.shape
    visible = torch.ones(batch, query_heads, length, length + 1, dtype=torch.bool)
    column_of = torch.full((batch, length + 1), length)
    position = torch.where(mask == 1, mask.cumsum(1) - 1, length)
    column_of.scatter_(1, position, torch.arange(length).expand(batch, -1))
    column_of[:, length] = length
    for read in reads:
        if read.layer_idx != layer_idx:
            continue
        at = torch.where(read.positions < 0, length, read.positions)
        columns = column_of[:, None].expand(-1, at.shape[1], -1).gather(2, at)
        seen = torch.zeros(batch, columns.shape[1], length + 1, dtype=torch.bool).scatter_(2, columns, True)
        visible[:, :, read.seen_tokens - 1] = seen.repeat_interleave(query_heads // columns.shape[1], 1)
    return visible[..., :length]


@pytest.fixture
def gold():
    def run(model, ids, mask, reads):
        previous = model.config._attn_implementation
        AttentionInterface.register("gold_reads", gold_attention)
        AttentionMaskInterface.register("gold_reads", full_mask)
        attention = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
        try:
            model.set_attn_implementation("gold_reads")
            for index, module in attention.items():
                heads = model.config.num_attention_heads
                module.gold_visible = visible_from(reads, index, mask, heads)
            with torch.no_grad():
                position_ids = (mask.cumsum(1) - 1).clamp(min=0)
                return model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        finally:
            for module in attention.values():
                vars(module).pop("gold_visible", None)
            model.set_attn_implementation(previous)
            AttentionInterface._global_mapping.pop("gold_reads")
            AttentionMaskInterface._global_mapping.pop("gold_reads")

    return run


def extend(mask, length):
    return torch.cat((mask, mask.new_ones(mask.shape[0], length - mask.shape[1])), dim=1)


def check_reads(reads, lengths, budget=BUDGET):
    """Sinks and window are read, nothing twice, never more than the budget, all of it where there is so much."""
    for read in reads:
        new = read.seen_tokens - max(lengths)
        for row, length in enumerate(lengths):
            for positions in read.positions[row].tolist():
                real = [p for p in positions if p >= 0]
                assert len(real) == len(set(real)) == min(budget, length + new)
                assert set(range(min(SINKS, length))) <= set(real)
                assert set(range(max(0, length + new - RECENT), length + new)) <= set(real)


def check_gold(model, output, reads, mask, gold, first):
    full = extend(mask, output.sequences.shape[1])
    expected = gold(model, output.sequences, full, reads)[:, first:-1]
    assert (torch.stack(output.logits, 1) - expected).abs().max() < 1e-4
    # The test can fail: dense logits are others.
    assert (gold(model, output.sequences, full, [])[:, first:-1] - expected).abs().max() > 0.05


@pytest.mark.parametrize("name", ALLOCATORS)
def test_steps_attend_to_exactly_what_was_read(llama, left_padded, gold, name):
    lengths = [41, 33, 9]
    ids, mask, _ = left_padded(lengths)
    press = RetrievalPress(ALLOCATORS[name], BUDGET, num_sinks=SINKS, num_recent=RECENT)
    output, reads, run = generate(llama, ids, mask, 18, press)
    assert run.bound and run.num_sparse_steps == 17
    check_reads(reads, lengths)
    check_gold(llama, output, reads, mask, gold, first=40)


def test_every_architecture(model, left_padded, gold):
    ids, mask, _ = left_padded([36, 29])
    press = RetrievalPress(ALLOCATORS["community"], BUDGET, num_sinks=SINKS, num_recent=RECENT)
    output, reads, run = generate(model, ids, mask, 8, press)
    check_reads(reads, [36, 29])
    assert {read.layer_idx for read in reads} == set(run._facts.attention)
    check_gold(model, output, reads, mask, gold, first=35)


@pytest.mark.parametrize(
    "name",
    [
        "community",
        "community_refresh",
        "clusters_nearest",
        "pages",
        "community_per_head",
        "community_per_head_paper",
        "oracle_per_head",
    ],
)
def test_second_turn(llama, left_padded, random_tokens, gold, name):
    """More text on the same cache: padding between the turns of a row, a dense chunk, then steps over old and new."""
    ids, mask, _ = left_padded([30, 22])
    press = RetrievalPress(ALLOCATORS[name], BUDGET, num_sinks=SINKS, num_recent=RECENT)
    cache = DynamicCache(config=llama.config)
    first, early, _ = generate(llama, ids, mask, 9, press, cache)
    again = torch.cat((first.sequences, random_tokens(2, 14, seed=5)), dim=1)
    mask = extend(mask, again.shape[1])
    mask[1, -14:-10] = 0
    second, late, run = generate(llama, again, mask, 9, press, cache)
    assert len(run.events) >= 1
    for read in late:
        for positions in map(set, read.positions.flatten(0, 1).tolist()):
            assert len(positions) == BUDGET and positions >= set(range(SINKS)) and -1 not in positions
    full = extend(mask, second.sequences.shape[1])
    # Positions are the row's own; the gold run finds their columns through the mask.
    expected = gold(llama, second.sequences, full, early + late)[:, again.shape[1] - 1 : -1]
    assert (torch.stack(second.logits, 1) - expected).abs().max() < 1e-4


def test_the_cache_is_complete_after_the_block(model, left_padded, gold):
    """Outside the press everything is read again, in chunks and in steps, padded rows included."""
    ids, mask, _ = left_padded([40, 32])
    mask[:, 26:] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    press = RetrievalPress(ALLOCATORS["community"], BUDGET, num_sinks=SINKS, num_recent=RECENT)
    reads, logits, cache, start = [], [], DynamicCache(config=model.config), 0
    press = RetrievalPress(press.allocator, BUDGET, SINKS, RECENT, on_read=reads.append)

    def feed(size):
        nonlocal start
        piece = slice(start, start + size)
        with torch.no_grad():
            out = model(
                ids[:, piece],
                attention_mask=mask[:, : start + size],
                position_ids=positions[:, piece],
                past_key_values=cache,
                use_cache=True,
            )
        start += size
        logits.append(out.logits)

    with press(model):
        for size in (28, 1, 1, 1):
            feed(size)
    for size in (4, 1, 1, 3):
        feed(size)
    expected = gold(model, ids, mask, reads)
    real = mask.bool()
    assert (torch.cat(logits, dim=1)[real] - expected[real]).abs().max() < 1e-4


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("name", ["community", "community_refresh", "clusters_nearest", "window"])
def test_raising_the_budget_to_the_length_is_dense(llama, left_padded, random_tokens, gold, name, padding):
    """In a second block on the same cache; padding between the turns of a row moved to its front in the first block."""
    ids, mask, _ = left_padded([30, 22])
    press = RetrievalPress(ALLOCATORS[name], BUDGET, num_sinks=SINKS, num_recent=RECENT)
    cache = DynamicCache(config=llama.config)
    first, reads, _ = generate(llama, ids, mask, 9, press, cache)
    again = torch.cat((first.sequences, random_tokens(2, 14, seed=5)), dim=1)
    mask = extend(mask, again.shape[1])
    mask[1, -14 : padding - 14] = 0
    second, more, run = generate(llama, again, mask, 7, press, cache)
    assert run.events and cache.layers[0].index.moved_padding == (padding > 0)
    mask, start = extend(mask, second.sequences.shape[1]), second.sequences.shape[1] - 1
    tokens = random_tokens(2, 9, seed=6)
    dense = RetrievalPress(ALLOCATORS[name], 200, num_sinks=SINKS, num_recent=RECENT)
    text, logits = second.sequences[:, :start], []
    with dense(llama) as run, torch.no_grad(), pytest.warns(UserWarning, match="fit the budget of 200 slots"):
        # A chunk and single tokens.
        for piece in tokens.split([1, 1, 4, 1, 1, 1], dim=1):
            text = torch.cat((text, piece), dim=1)
            full = extend(mask, text.shape[1])[:, : text.shape[1]]
            logits.append(llama(piece, attention_mask=full, past_key_values=cache, use_cache=True).logits)
    expected = gold(llama, text, full, reads + more)[:, start:]
    assert not run.bound and (torch.cat(logits, dim=1) - expected).abs().max() < 1e-4


def test_padding_between_turns_is_back_in_its_place_outside(
    llama, left_padded, random_tokens, gold, key_hash, shaped_topk
):
    """The model goes on alone, another press takes over, and a roll-back finds the tokens where they came."""
    ids, mask, _ = left_padded([30, 22])
    press = RetrievalPress(ALLOCATORS["community"], BUDGET, num_sinks=SINKS, num_recent=RECENT)
    cache = DynamicCache(config=llama.config)
    first, early, _ = generate(llama, ids, mask, 9, press, cache)
    again = torch.cat((first.sequences, random_tokens(2, 14, seed=5)), dim=1)
    mask = extend(mask, again.shape[1])
    mask[1, -14:-10] = 0
    second, late, _ = generate(llama, again, mask, 7, press, cache)
    assert cache.layers[0].index.moved_padding
    start = second.sequences.shape[1] - 1
    text = torch.cat((second.sequences[:, :start], random_tokens(2, 6, seed=6)), dim=1)
    full = extend(mask, text.shape[1])
    positions = (full.cumsum(1) - 1).clamp(min=0)
    came = torch.where(full == 1, positions, -1)
    evicting, rolled, repeated = copy.deepcopy(cache), copy.deepcopy(cache), copy.deepcopy(cache)
    pieces = [slice(start, start + 1), slice(start + 1, start + 5), slice(start + 5, start + 6)]
    with torch.no_grad():
        logits = [
            llama(
                text[:, piece],
                attention_mask=full[:, : piece.stop],
                position_ids=positions[:, piece],
                past_key_values=cache,
                use_cache=True,
            ).logits
            for piece in pieces
        ]
    expected = gold(llama, text, full, early + late)[:, start:]
    assert (torch.cat(logits, dim=1) - expected).abs().max() < 1e-4
    with EvictionPress(key_hash, shaped_topk(), budget=100)(llama), torch.no_grad():
        llama(text[:, pieces[0]], attention_mask=full[:, : start + 1], past_key_values=evicting, use_cache=True)
    rolled.crop(-3)
    repeated.batch_select_indices(torch.tensor([1, 1]))
    repeated.crop(-3)
    for layer in evicting.layers:
        assert torch.equal(layer.positions, came[:, None, : start + 1].expand_as(layer.positions))
    for layer in rolled.layers:
        assert torch.equal(layer.positions, came[:, None, : start - 3].expand_as(layer.positions))
    for layer in repeated.layers:
        assert torch.equal(layer.positions, came[1:, None, : start - 3].expand_as(layer.positions))


def test_members_that_joined_are_put_in_order(llama, left_padded, gold, monkeypatch):
    """New members of old regions move into their ranges once there are many; labels and reads stay right."""
    monkeypatch.setattr("kvstitch.allocators.retrieval.growth.RELAYOUT_TOKENS", 6)
    ids, mask, _ = left_padded([38, 30])
    for name in ("community_paper", "community_nearest"):
        press = RetrievalPress(ALLOCATORS[name], BUDGET, num_sinks=SINKS, num_recent=RECENT)
        output, reads, run = generate(llama, ids, mask, 22, press)
        assert len(run.events) >= 4
        check_reads(reads, [38, 30])
        check_gold(llama, output, reads, mask, gold, first=37)
