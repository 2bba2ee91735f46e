"""Rows of a batch that differ much: what is padding in one row is text in another, in front and in the middle."""

import pytest
import torch
from transformers import DynamicCache

from kvstitch.allocators.retrieval import ClusterRetrieval, CommunityRetrieval, PageRetrieval
from kvstitch.presses.retrieval import RetrievalPress

ALLOCATORS = {
    "pages": PageRetrieval(page_size=4),
    "clusters": ClusterRetrieval(tokens_per_cluster=4, growth_tokens=8),
    "recommended": CommunityRetrieval(top_k=3),
    "every_query": CommunityRetrieval(top_k=3, edge_stride=1, replacement=0, refine_steps=0),
    "paper": CommunityRetrieval.paper(top_k=3),
}


def feed(model, ids, mask, sizes, cache=None):
    """Logits of forwards of `sizes` tokens with positions that leave padding out."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, start, logits = cache or DynamicCache(config=model.config), 0, []
    for size in sizes:
        piece = slice(start, start + size)
        start += size
        with torch.no_grad():
            output = model(
                ids[:, piece],
                attention_mask=mask[:, :start],
                position_ids=positions[:, piece],
                past_key_values=cache,
                use_cache=True,
            )
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("length", [6, 9, 13])
def test_a_row_that_ends_among_its_sinks_is_dense(llama, left_padded, name, length):
    """It fits into the budget beside a row of which a part is read; its first tokens leave the window as sinks."""
    ids, mask, rows = left_padded([640, length + 24])
    with RetrievalPress(ALLOCATORS[name], 40, num_sinks=10, num_recent=8)(llama):
        batch = feed(llama, ids, mask, [616] + [1] * 24)
    dense = feed(llama, rows[1], torch.ones_like(rows[1]), [length + 24])
    assert (batch[1, -24:] - dense[0, -24:]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ALLOCATORS)
def test_padding_inside_a_row_changes_nothing(llama, random_tokens, name):
    """A second chunk that is shorter in one row; the graph of that row is the graph of its text."""
    text, other, padding = random_tokens(1, 78, seed=3), random_tokens(1, 83, seed=4), random_tokens(1, 5, seed=5)
    ids = torch.cat((other, torch.cat((text[:, :40], padding, text[:, 40:]), dim=1)))
    mask = torch.ones_like(ids)
    mask[1, 40:45] = 0
    press = RetrievalPress(ALLOCATORS[name], 20, num_sinks=2, num_recent=4)
    with press(llama):
        batch = feed(llama, ids, mask, [40, 35] + [1] * 8)
        alone = feed(llama, text, torch.ones_like(text), [40, 30] + [1] * 8)
    assert (batch[1, -8:] - alone[0, -8:]).abs().max() < 1e-4


@pytest.mark.parametrize("growth", ["delta_q", "chunk"])
@pytest.mark.parametrize("steps", [3, 11, 15, 18])
def test_a_turn_between_two_refreshes_takes_the_decoded_tokens_edges(llama, random_tokens, growth, steps):
    """Whenever the turn comes, the graph that is cut for it holds each token that was decoded before it."""
    allocator = CommunityRetrieval.paper(top_k=3, refresh=12, growth=growth)
    ids, cache = random_tokens(1, 40 + steps + 8 + 40), DynamicCache(config=llama.config)
    with RetrievalPress(allocator, 20, num_sinks=2, num_recent=4)(llama) as run:
        feed(llama, ids[:, : 40 + steps + 8], torch.ones(1, 40 + steps + 8).long(), [40] + [1] * steps + [8], cache)
        for layer in run.layers.values():
            edges = layer.index.index._edges.of(0, 0).arrays()
            assert sorted(edges.seen.tolist()) == list(range(48 + steps))
        assert torch.isfinite(feed(llama, ids, torch.ones_like(ids), [40] + [1] * steps + [8] + [1] * 40)).all()


def test_a_prompt_that_outgrows_its_budget_with_few_neighbours(llama, random_tokens):
    """It fitted, so nobody could refuse it; by the time that it does not, a query links all there is."""
    ids = random_tokens(1, 60)
    allocator = CommunityRetrieval(top_k=40, edge_stride=1)
    with RetrievalPress(allocator, 34, num_sinks=2, num_recent=4)(llama) as run:
        with pytest.warns(UserWarning, match="30 tokens fit the budget"):
            logits = feed(llama, ids, torch.ones_like(ids), [30] + [1] * 30)
        assert run.events
    assert torch.isfinite(logits).all()
