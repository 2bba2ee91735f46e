"""What a retrieval press does at the edges of its budget: lifted fractions, prompts that fit, prompts with too few neighbours."""

import time

import pytest
import torch

from kvstitch.allocators.retrieval import CommunityRetrieval, GraphEviction, PageRetrieval
from kvstitch.allocators.retrieval.partitioning import Partitioning
from kvstitch.presses import retrieval_run
from kvstitch.presses.retrieval import RetrievalPress

SMALL = dict(num_sinks=2, num_recent=4)
GREEDY = dict(do_sample=False, suppress_tokens=[0])
KEPT_WHOLE = "ignore:kvstitch. .* tokens fit the budget"


def decode(model, ids, prompt, steps, cache=None):
    logits, start = [], 0
    with torch.no_grad():
        for size in [prompt] + [1] * steps:
            out = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + size
            logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


# -- the least budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sinks", [0, 1, 2, 10, 40, 200])
@pytest.mark.parametrize("num_recent", [None, 1, 32, 50])
def test_the_least_budget_is_the_least_that_is_accepted(num_sinks, num_recent):
    press = RetrievalPress(PageRetrieval(), 0.5, num_sinks, num_recent)
    least = press.least_budget
    for budget in range(least, least + 200):
        assert press.plan_for((budget,)).retrieved[0] >= 1
    for budget in range(1, least):
        with pytest.raises(ValueError, match=f"at least {least} slots, got {budget}"):
            press.plan_for((budget,))


def test_a_fraction_of_a_short_prompt_is_lifted(llama, random_tokens):
    """With the press's own window, a quarter of the budget, and in a batch the window of its shortest row."""
    ids = random_tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[1, :35] = 0
    with RetrievalPress(CommunityRetrieval(top_k=3), 0.1)(llama) as run:
        llama.generate(input_ids=ids[:1], attention_mask=mask[:1], max_new_tokens=4, **GREEDY)
    assert run.events[0].budgets == (14,) and run.events[0].num_recent == 3 and run.num_sparse_steps == 3
    with RetrievalPress(CommunityRetrieval(top_k=3), 0.2)(llama) as run:
        llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **GREEDY)
    assert run.events[0].budgets == (20, 14)


def test_bytes_that_do_not_hold_the_window_are_refused_in_bytes(llama):
    """12 slots hold 10 sinks, one recent token and one more, but a window of 12 slots is 3 tokens."""
    per_slot = 4 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head dim, float32
    with pytest.raises(ValueError, match=f"buys 12 slots.*need 14: at least {14 * per_slot}"):
        RetrievalPress(PageRetrieval(), f"{12 * per_slot}B")(llama)
    RetrievalPress(PageRetrieval(), f"{14 * per_slot}B")(llama)


# -- neighbours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CommunityRetrieval, GraphEviction])
def test_more_edges_than_neighbours_are_refused_before_the_prompt_is_read(llama, left_padded, kind):
    """29 of 31 tokens are no sinks; what `generate` pads does not count."""
    ids, mask, _ = left_padded([31])
    ids = torch.nn.functional.pad(ids, (9, 0))
    mask = torch.nn.functional.pad(mask, (9, 0))
    forwards = []
    llama.model.layers[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    message = r"less than the 29 tokens of the prompt that can be neighbours \(31 without padding, of which 2 are sinks\), got 29"
    with RetrievalPress(kind(top_k=29), 14, **SMALL)(llama), pytest.raises(ValueError, match=message):
        llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **GREEDY)
    assert not forwards
    with RetrievalPress(kind(top_k=28), 14, **SMALL)(llama) as run:
        llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **GREEDY)
    assert run.num_sparse_steps == 3


@pytest.mark.parametrize("kind", [CommunityRetrieval, GraphEviction])
def test_too_many_edges_are_refused_when_a_prompt_turns_out_to_be_complete(llama, random_tokens, kind):
    """A forward by hand may be the first of several, so the first single token tells."""
    ids = random_tokens(1, 50)
    with RetrievalPress(kind(top_k=20), 14, **SMALL)(llama) as run:
        _, cache = decode(llama, ids, 16, 0)
        # A second piece, and there are enough.
        decode(llama, ids[:, 16:], 14, 3, cache)
        assert run.num_sparse_steps == 3
        _, cache = decode(llama, ids, 22, 0)
        with pytest.raises(ValueError, match="less than the 20 tokens of the prompt that can be neighbours"):
            decode(llama, ids[:, 22:], 1, 0, cache)


def test_sinks_in_the_graph_are_neighbours(llama, random_tokens):
    ids = random_tokens(1, 30)
    allocator = CommunityRetrieval(top_k=29, sinks_in_graph=True)
    with RetrievalPress(allocator, 14, **SMALL)(llama) as run:
        llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **GREEDY)
    assert run.bound


@pytest.mark.filterwarnings(KEPT_WHOLE)
@pytest.mark.parametrize("kind", [CommunityRetrieval, GraphEviction])
def test_a_prompt_that_fits_is_not_refused(llama, left_padded, kind):
    """Neither alone nor as a short row of a batch."""
    ids, mask, _ = left_padded([60, 12])
    for rows, budget in ((slice(1, 2), 40), (slice(0, 2), 20)):
        with RetrievalPress(kind(top_k=12), budget, **SMALL)(llama):
            llama.generate(input_ids=ids[rows], attention_mask=mask[rows], max_new_tokens=4, **GREEDY)


# -- prompts that fit -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cuts(monkeypatch):
    """Calls that cut a graph."""
    calls = []
    cut = Partitioning.__call__

    def counted(self, *args):
        calls.append(1)
        return cut(self, *args)

    monkeypatch.setattr(Partitioning, "__call__", counted)
    return calls


@pytest.mark.filterwarnings(KEPT_WHOLE)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("budget", [200, 1.0])
def test_nothing_is_cut_for_a_prompt_that_fits(llama, random_tokens, cuts, workers, budget):
    ids = random_tokens(2, 60)
    for allocator in (CommunityRetrieval(top_k=3), CommunityRetrieval.paper(top_k=3)):
        with RetrievalPress(allocator, budget, **SMALL, workers=workers)(llama) as run:
            llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **GREEDY)
        assert not run.bound and not cuts


@pytest.mark.filterwarnings(KEPT_WHOLE)
def test_what_outgrows_the_budget_has_the_communities_of_its_prompt(llama, random_tokens, cuts, monkeypatch):
    """They are cut in the background a while before they are needed, and are those that would have been cut at once."""
    ids, budget, graphs = random_tokens(1, 120), 90, 4 * 2
    nearly = budget - retrieval_run._AHEAD_TOKENS
    press = RetrievalPress(CommunityRetrieval(top_k=3), budget, **SMALL, workers=2)
    with press(llama) as run:
        _, cache = decode(llama, ids, 40, nearly - 40)
        assert not cuts and not run.events
        decode(llama, ids[:, nearly:], 1, 0, cache)
        begun = time.monotonic()
        while len(cuts) < graphs and time.monotonic() < begun + 60:
            time.sleep(0.01)
        assert len(cuts) == graphs and not run.events
        late, _ = decode(llama, ids[:, nearly + 1 :], 1, 50, cache)
    assert len(run.events) == 1 and len(cuts) == graphs
    monkeypatch.setattr(retrieval_run, "_AHEAD_TOKENS", budget)
    with press(llama) as eager:
        early, _ = decode(llama, ids, 40, nearly + 52 - 40)
    shown, expected = (each.events[0].layers for each in (run, eager))
    for one, other in zip(shown, expected):
        assert all(torch.equal(one.details[name], other.details[name]) for name in ("sizes", "modularity"))
    assert (late - early[:, nearly + 1 :]).abs().max() < 1e-4


@pytest.mark.filterwarnings(KEPT_WHOLE)
def test_work_that_waited_for_another_run_is_done(llama, random_tokens, cuts):
    """The block in which the prompt was read is closed before its communities are wanted."""
    ids = random_tokens(1, 80)
    press = RetrievalPress(CommunityRetrieval(top_k=3), 60, **SMALL)
    with press(llama):
        _, cache = decode(llama, ids, 20, 2)
    assert not cuts
    with press(llama) as run:
        decode(llama, ids[:, 23:], 1, 45, cache)
    assert run.events[0].busy_seconds > 0 and "modularity" in run.events[0].layers[0].details
