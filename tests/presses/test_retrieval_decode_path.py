"""A step that reads a part of the cache waits for nothing, and does the same work whatever the length and the heads."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.allocators.retrieval import (
    ClusterRetrieval,
    CommunityRetrieval,
    GraphEviction,
    PageRetrieval,
    WindowRetrieval,
)
from kvstitch.presses import RetrievalPress

SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.unique", "aten.masked_select", "aten.equal")
ALLOCATORS = {
    "recommended": CommunityRetrieval(top_k=3, refine_steps=1, replacement=3),
    "paper": CommunityRetrieval.paper(top_k=3),
    "exact_boundary": CommunityRetrieval(top_k=3, refine_steps=0, truncation="exact"),
    "shortlist": CommunityRetrieval(top_k=3, refine_steps=0, shortlist=2),
    "tree": CommunityRetrieval(top_k=3, refine_steps=0, levels=2),
    "high_tree": CommunityRetrieval(top_k=3, refine_steps=0, levels="auto"),
    "nearest": ClusterRetrieval(tokens_per_cluster=4, steps=1, growth="nearest"),
    "quest": PageRetrieval(page_size=4),
    "window": WindowRetrieval(),
    "static": GraphEviction(top_k=3),
}


class Watch(TorchDispatchMode):
    """Counts operators and notes those that wait for a device."""

    def __init__(self):
        super().__init__()
        self.syncs, self.operators = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.operators += 1
        if name.startswith(SYNCS):
            self.syncs.append(name)
        return func(*args, **(kwargs or {}))


def model_of(heads):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=heads, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def watched_steps(model, allocator, length, steps=3):
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(length))
    with RetrievalPress(allocator, 40, num_sinks=2, num_recent=4)(model) as run, torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        # The first steps build the index and make room.
        for _ in range(2):
            model(ids[:, :1], past_key_values=cache)
        with Watch() as watch:
            for _ in range(steps):
                model(ids[:, :1], past_key_values=cache)
    assert run.num_sparse_steps == steps + 2 and len(run.events) == 1
    return watch


@pytest.mark.parametrize("name", ALLOCATORS)
def test_steps_do_not_wait_and_do_not_depend_on_the_length(name):
    model = model_of(2)
    short, long = (watched_steps(model, ALLOCATORS[name], length) for length in (120, 300))
    assert short.syncs == long.syncs == []
    assert short.operators == long.operators


@pytest.mark.parametrize("name", ["recommended", "paper", "quest"])
def test_steps_have_no_work_per_head(name):
    counts = {watched_steps(model_of(heads), ALLOCATORS[name], 120).operators for heads in (2, 4)}
    assert len(counts) == 1
