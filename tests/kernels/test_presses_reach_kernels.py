"""Every kernel is reached from a press, through its API, and by "auto": what a GPU would run."""

import importlib

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.allocators import SegmentQuota
from kvstitch.allocators.retrieval import CommunityRetrieval
from kvstitch.presses import EvictionPress, RetrievalPress
from kvstitch.scorers import TOVA

OPERATORS = ("topk_attention", "sparse_decode", "compact", "segment_quota", "community_update")
PRESSES = {
    "ams": (
        EvictionPress(TOVA(), SegmentQuota(num_sinks=2, num_recent=4), budget=24, interval=4),
        {"segment_quota", "compact"},
    ),
    "communities": (
        RetrievalPress(CommunityRetrieval.paper(top_k=4), 32, num_sinks=4, num_recent=6, workers=0),
        {"topk_attention", "sparse_decode", "compact", "community_update"},
    ),
    # Storage keeps its order, as every query head has another; so nothing is compacted.
    "communities of query heads": (
        RetrievalPress(
            CommunityRetrieval.paper(top_k=4, aggregation="per_head"), 32, num_sinks=4, num_recent=6, workers=0
        ),
        {"topk_attention", "sparse_decode", "community_update"},
    ),
}


@pytest.fixture
def reached(monkeypatch):
    """(operator, impl) of each call, in order."""
    calls = []
    for operator in OPERATORS:
        module = importlib.import_module(f"kvstitch.kernels.{operator}.api")
        resolve = module.resolve_implementation

        def note(impl, tensor, operator=operator, resolve=resolve):
            calls.append((operator, impl))
            return resolve(impl, tensor)

        monkeypatch.setattr(module, "resolve_implementation", note)
    return calls


@pytest.mark.parametrize("name", PRESSES)
def test_a_press_leaves_the_choice_to_its_kernels(name, reached):
    press, wanted = PRESSES[name]
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None, pad_token_id=0)).eval()
    with press(model):
        model.generate(torch.randint(1, 64, (1, 70)), max_new_tokens=9, do_sample=False)
    assert {operator for operator, _ in reached} == wanted
    assert {impl for _, impl in reached} == {"auto"}


def test_no_kernel_is_left_over():
    assert set().union(*(wanted for _, wanted in PRESSES.values())) == set(OPERATORS)
