"""Life of a retrieval press: dense when it should be, complete always, state with the request, errors before anything runs."""

import copy
import dataclasses
import threading
import time

import pytest
import torch

from kvstitch.allocators.retrieval import (
    ClusterRetrieval,
    CommunityRetrieval,
    OracleRetrieval,
    PageRetrieval,
    WindowRetrieval,
)
from kvstitch.allocators.retrieval.community_index import CommunityIndex
from kvstitch.presses import EvictionPress, UnsupportedModel
from kvstitch.presses.retrieval import RetrievalPress
from kvstitch.presses.retrieval_run import RetrievalRun

SMALL = dict(num_sinks=2, num_recent=4)
COMMUNITY = CommunityRetrieval(top_k=3, growth_tokens=4)


@pytest.fixture(params=["community", "paper", "pages", "clusters"])
def press(request):
    allocator = {
        "community": COMMUNITY,
        "paper": CommunityRetrieval.paper(top_k=3, refresh=7),
        "pages": PageRetrieval(page_size=4),
        "clusters": ClusterRetrieval(tokens_per_cluster=4, growth="nearest"),
    }[request.param]
    return RetrievalPress(allocator, 14, **SMALL)


def generate(model, ids, mask=None, tokens=16, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    # The embedding of token 0 is zero, and with it every q.k: a tie among all slots.
    options = dict(max_new_tokens=tokens, do_sample=False, suppress_tokens=[0]) | options
    return model.generate(input_ids=ids, attention_mask=mask, **options)


def step_through(model, ids, pieces, cache=None):
    logits, start = [], 0
    with torch.no_grad():
        for size in pieces:
            out = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + size
            logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


def test_a_budget_of_the_length_is_dense(model, left_padded):
    ids, mask, _ = left_padded([30, 21])
    options = dict(return_dict_in_generate=True, output_logits=True)
    dense = generate(model, ids, mask, **options)
    with pytest.warns(UserWarning, match="fit the budget of 46 slots"), RetrievalPress(COMMUNITY, 46)(model) as run:
        pressed = generate(model, ids, mask, **options)
    assert not run.bound and not run.events
    assert torch.equal(pressed.sequences, dense.sequences)
    assert (torch.stack(pressed.logits) - torch.stack(dense.logits)).abs().max() < 1e-4


def test_dense_is_said_once_and_ends_when_the_budget_is_full(llama, random_tokens):
    with pytest.warns(UserWarning) as warned, RetrievalPress(COMMUNITY, 30, **SMALL)(llama) as run:
        generate(llama, random_tokens(1, 26), tokens=12)
        assert run.bound and run.events[0].seen_tokens == 30
        generate(llama, random_tokens(1, 20), tokens=4)
    assert len([w for w in warned if "fit the budget" in str(w.message)]) == 1


def test_chunked_prefill_is_the_whole_prefill(model, random_tokens, press):
    ids = random_tokens(2, 46)
    results = []
    for pieces in ([34], [13, 12, 9]):
        with press(model) as run:
            logits, _ = step_through(model, ids, [*pieces, *[1] * 12])
        results.append(logits)
        assert run.events[0].seen_tokens == 34
    assert (results[0] - results[1]).abs().max() < 1e-3


def fingerprint(model):
    from transformers import AttentionInterface, AttentionMaskInterface

    return (
        model.config._attn_implementation,
        "generate" in vars(model),
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
    )


def pool_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvstitch")]


@pytest.mark.parametrize("moment", ["prefill", "decode", "event", "read"])
def test_an_exception_leaves_nothing_behind(llama, random_tokens, moment):
    press = RetrievalPress(COMMUNITY, 14, **SMALL)
    ids = random_tokens(1, 30)
    with press(llama):
        expected = generate(llama, ids)
    before, calls = fingerprint(llama), []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == (8 if moment == "decode" else 1):
            raise ZeroDivisionError("on purpose")

    hook = None
    if moment == "event":
        press = RetrievalPress(COMMUNITY, 14, **SMALL, on_event=fail)
    elif moment == "read":
        press = RetrievalPress(COMMUNITY, 14, **SMALL, on_read=fail)
    else:
        hook = llama.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), press(llama):
        generate(llama, ids)
    if hook is not None:
        hook.remove()
    assert fingerprint(llama) == before and not pool_threads()
    with RetrievalPress(COMMUNITY, 14, **SMALL)(llama):
        assert torch.equal(generate(llama, ids), expected)


def test_samples_do_not_depend_on_their_order(llama, random_tokens, press):
    a, b = random_tokens(1, 31, seed=1), random_tokens(1, 44, seed=2)
    with press(llama):
        first = [generate(llama, a), generate(llama, b)]
    with press(llama):
        second = [generate(llama, b), generate(llama, a), generate(llama, a)]
    assert torch.equal(first[0], second[1]) and torch.equal(first[0], second[2])
    assert torch.equal(first[1], second[0])


def test_two_requests_interleaved_and_a_copy(llama, random_tokens, press):
    prompts = [random_tokens(1, 31, seed=1), random_tokens(1, 38, seed=2)]
    with press(llama), torch.no_grad():
        alone = [step_through(llama, ids, [ids.shape[1] - 8] + [1] * 8)[0][:, -8:] for ids in prompts]
        caches = [step_through(llama, ids, [ids.shape[1] - 8])[1] for ids in prompts]
        together = [[], []]
        for step in range(8):
            for i, ids in enumerate(prompts):
                token = ids[:, ids.shape[1] - 8 + step][:, None]
                together[i].append(llama(token, past_key_values=caches[i], use_cache=True).logits)
                if step == 4 and i == 0:
                    # The copy goes on by itself, and does not disturb the original.
                    copied = copy.deepcopy(caches[0])
                    for later in range(5, 8):
                        last = llama(prompts[0][:, -8 + later][:, None], past_key_values=copied, use_cache=True).logits
    for i in (0, 1):
        assert torch.equal(torch.cat(together[i], dim=1), alone[i])
    assert torch.equal(last, alone[0][:, -1:])


def test_beams_are_those_of_their_own_history(llama, random_tokens, press):
    """Each beam that comes out gets, decoded alone, the scores that it got in the search."""
    ids = random_tokens(1, 30)
    with press(llama):
        out = generate(
            llama, ids, tokens=8, num_beams=3, num_return_sequences=3, return_dict_in_generate=True, output_scores=True
        )
        transition = llama.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        for row, sequence in enumerate(out.sequences):
            logits, _ = step_through(llama, sequence[None], [30] + [1] * 8)
            picked = logits[0, 29:-1].log_softmax(-1).gather(1, sequence[30:, None])[:, 0]
            assert (picked - transition[row]).abs().max() < 1e-3


@pytest.mark.parametrize("budget", [14, 0.4])
@pytest.mark.parametrize("allocator", [PageRetrieval(page_size=4), WindowRetrieval(), OracleRetrieval(), COMMUNITY])
def test_row_of_a_padded_batch_is_its_own_single_run(llama, left_padded, allocator, budget):
    ids, mask, rows = left_padded([40, 31, 33])
    press = RetrievalPress(allocator, budget, **SMALL)
    with press(llama):
        batch = generate(llama, ids, mask)
        for row, single in enumerate(rows):
            assert torch.equal(batch[row, -16:], generate(llama, single)[0, -16:]), f"row {row}"


def test_a_cache_filled_before_the_press_is_taken_over(llama, random_tokens, press):
    """Its queries are gone; what needs them falls back to runs of neighbours."""
    ids = random_tokens(1, 40)
    _, cache = step_through(llama, ids, [30])
    with press(llama) as run:
        logits, _ = step_through(llama, ids[:, 30:], [1] * 10, cache)
    assert run.num_sparse_steps == 10 and logits.isfinite().all()


def test_tokens_that_came_outside_the_press_are_indexed(llama, random_tokens, press):
    ids = random_tokens(1, 60)
    with press(llama):
        _, cache = step_through(llama, ids, [30, 1, 1])
    _, cache = step_through(llama, ids[:, 32:], [9, 1, 1], cache)
    with press(llama) as run:
        step_through(llama, ids[:, 43:], [1] * 12, cache)
    assert run.num_sparse_steps == 12 and len(run.events) >= 1
    assert all(layer.keys.shape[2] == 55 for layer in cache.layers)


def test_a_second_block_has_its_own_pool(llama, random_tokens, monkeypatch):
    """What is partitioned anew in it runs beside it, and it tells how long that took."""
    threads = []
    cut = CommunityIndex._cut

    def noted(self, edges):
        threads.append(threading.current_thread())
        time.sleep(0.02)
        return cut(self, edges)

    monkeypatch.setattr(CommunityIndex, "_cut", noted)
    press = RetrievalPress(CommunityRetrieval(top_k=3, refresh=5), 14, **SMALL, workers=2)
    with press(llama):
        _, cache = step_through(llama, random_tokens(1, 40), [30] + [1] * 3)
    threads.clear()
    with press(llama) as run:
        step_through(llama, random_tokens(1, 16, seed=1), [1] * 16, cache)
    assert run.events and any(thread is not threading.main_thread() for thread in threads)
    assert all(event.busy_seconds > 0 for event in run.events)
    # 8 graphs that sleep, of which the last ones have just begun when they are wanted.
    assert sum(event.exposed_seconds for event in run.events) > 0 and not pool_threads()


def test_roll_back_is_exact(llama, random_tokens):
    """The index starts anew."""
    ids = random_tokens(1, 50)
    press = RetrievalPress(WindowRetrieval(), 14, **SMALL)
    with press(llama):
        _, cache = step_through(llama, ids, [30] + [1] * 6)
        cache.crop(-5)
        rolled, _ = step_through(llama, ids[:, 31:], [1] * 6, cache)
        straight, _ = step_through(llama, ids, [30] + [1] * 7)
    assert (rolled[:, :6] - straight[:, 31:37]).abs().max() < 1e-4


def test_roll_back_restores_the_order(llama, random_tokens, press):
    ids = random_tokens(1, 50)
    with press(llama):
        _, cache = step_through(llama, ids, [30] + [1] * 6)
        cache.crop(-5)
        assert all(torch.equal(layer.positions[0, 0], torch.arange(31)) for layer in cache.layers)
        logits, _ = step_through(llama, ids[:, 31:], [1] * 6, cache)
    assert logits.isfinite().all()


def test_another_press_gets_the_order_of_positions(llama, random_tokens, key_hash, shaped_topk):
    ids = random_tokens(1, 50)
    with RetrievalPress(COMMUNITY, 14, **SMALL)(llama):
        _, cache = step_through(llama, ids, [36, 1, 1])
    with EvictionPress(key_hash, shaped_topk(), budget=12, interval=4)(llama) as run, torch.no_grad():
        llama(ids[:, 38:39], past_key_values=cache, use_cache=True)
        assert all(torch.equal(run.positions(layer)[0, 0], torch.arange(39)) for layer in range(4))
        step_through(llama, ids[:, 39:], [1] * 6, cache)
        assert run.num_events >= 1
    with pytest.raises(NotImplementedError, match="complete cache"), RetrievalPress(COMMUNITY, 14, **SMALL)(llama):
        step_through(llama, ids[:, 45:], [1], cache)


def test_dense_layers_read_everything(llama, random_tokens):
    reads = []
    press = RetrievalPress(COMMUNITY, 14, **SMALL, dense_layers=2, on_read=reads.append)
    with press(llama) as run:
        generate(llama, random_tokens(1, 40), tokens=4)
    assert {read.layer_idx for read in reads} == {2, 3}
    assert [layer.layer_idx for layer in run.events[0].layers] == [2, 3]
    # Layers without an index are no part of what it is a share of.
    indexed = [layer for layer in run._cache.layers if layer.index is not None]
    assert len(indexed) == 2
    assert run.index_share == run.index_bytes / sum(layer.keys.nbytes + layer.values.nbytes for layer in indexed)


def test_what_is_held_beside_the_cache_is_counted(llama, random_tokens, press):
    with press(llama) as run:
        generate(llama, random_tokens(1, 40), tokens=8)
    assert run.stored_tokens == [47] * 4
    held = sum(layer.index.index.stored_bytes for layer in run._cache.layers)
    positions = sum(layer.stored_positions.untyped_storage().nbytes() for layer in run._cache.layers)
    assert held > 0 and run.index_bytes == held + positions
    in_use = sum(layer.length * 2 * layer.keys.shape[1] * layer.keys.shape[3] * 4 for layer in run._cache.layers)
    assert run.index_share == run.index_bytes / in_use
    assert run.positions(0).dtype == torch.int64


def test_a_scorer_can_order_the_members(llama, random_tokens, key_hash):
    reads = []
    allocator = CommunityRetrieval(top_k=3, truncation="score", resolution=0.05, refine_steps=0)
    with RetrievalPress(allocator, 14, **SMALL, scorer=key_hash, on_read=reads.append)(llama) as run:
        generate(llama, random_tokens(1, 60), tokens=2)
        layer = run._cache.layers[0]
        positions, keys = layer.positions[0, 0], layer.keys[0, 0]
    scores = torch.sin(keys.float().sum(-1) * 7.0)
    score_of = dict(zip(positions.tolist(), scores.tolist()))
    label_of = dict(zip(positions.tolist(), layer.index.index.known_labels(layer.length)[0, 0].tolist()))
    read = set(reads[0].positions[0, 0].tolist())
    body = [p for p in range(2, 60 - 4) if label_of[p] >= 0]
    for label in {label_of[p] for p in body}:
        members = [p for p in body if label_of[p] == label]
        taken = [p for p in members if p in read]
        if taken and len(taken) < len(members):
            left = [score_of[p] for p in members if p not in read]
            assert min(score_of[p] for p in taken) >= max(left)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(budget=13, num_sinks=8, num_recent=5), "at least 14 slots, got 13"),
        (dict(budget=40, num_sinks=-1), "num_sinks"),
        (dict(budget=40, num_recent=0), "num_recent"),
        (dict(budget=40, dense_layers=True), "dense_layers"),
        (dict(budget=0), "positive"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RetrievalPress(COMMUNITY, **options)


def test_a_budget_in_bytes_that_buys_too_little_is_refused_before_anything_runs(llama):
    """What a step reads of the indexed layers counts: with fewer of them the same bytes buy more."""
    per_slot = 2 * 2 * 16 * 4  # keys and values, kv heads, head dim, float32
    press = RetrievalPress(COMMUNITY, f"{per_slot * 4 * 6}B", **SMALL)
    with pytest.raises(ValueError, match="buys 6 slots.*need 7|at least 7 slots, got 6"):
        press(llama)
    dataclasses.replace(press, dense_layers=1)(llama)


def test_wrong_parts_are_refused(llama, key_hash, random_tokens):
    with pytest.raises(TypeError, match=r"write CommunityRetrieval\(\)"):
        RetrievalPress(CommunityRetrieval, 40)
    with pytest.raises(ValueError, match="give the press a `scorer`"):
        RetrievalPress(CommunityRetrieval(truncation="score"), 40)
    with pytest.raises(ValueError, match="asks for no `scorer`"):
        RetrievalPress(COMMUNITY, 40, scorer=key_hash)
    with pytest.raises(ValueError, match="dense_layers"):
        RetrievalPress(COMMUNITY, 40, dense_layers=4)(llama)
    press = RetrievalPress(CommunityRetrieval(top_k=40), 14, **SMALL)
    with pytest.raises(ValueError, match="less than the 28 tokens of the prompt .*, got 40"), press(llama):
        generate(llama, random_tokens(1, 30))


def test_models_without_full_attention_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    with pytest.raises(UnsupportedModel, match="sliding window"):
        RetrievalPress(COMMUNITY, 40)(MistralForCausalLM(config).eval())


@pytest.fixture
def fused(monkeypatch):
    """Whether each forward of several tokens gave edges and output at once."""
    outputs = []
    attend = CommunityIndex.attend

    def watched(*args):
        outputs.append(attend(*args))
        return outputs[-1]

    monkeypatch.setattr(CommunityIndex, "attend", watched)
    return outputs


@pytest.mark.parametrize("aggregation", ["query_group", "per_head"])
def test_edges_may_come_out_of_the_attention_itself(model, left_padded, aggregation, fused, monkeypatch):
    """One operator gives edges and output, in a prompt of one piece or two, unless slots are empty."""
    ids, _, _ = left_padded([34, 34])
    press = RetrievalPress(
        CommunityRetrieval(top_k=3, growth_tokens=4, aggregation=aggregation, edge_stride=1), 14, **SMALL
    )
    if model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")
    for pieces in ([30, 1, 1, 1], [12, 18, 1, 1]):
        fused.clear()
        with press(model) as run:
            together, _ = step_through(model, ids, pieces)
        sizes = run.events[0].layers[0].details["sizes"]
        assert fused and all(output is not None for output in fused)
        assert run.events[0].attend_seconds > 0 and run.events[0].observe_seconds == 0
        with monkeypatch.context() as patch:
            patch.setattr(RetrievalRun, "_may_attend_while_observing", lambda *_: False)
            with press(model) as run:
                apart, _ = step_through(model, ids, pieces)
        assert (together - apart).abs().max() < 1e-4
        assert run.events[0].observe_seconds > 0 and run.events[0].attend_seconds == 0
        assert torch.equal(run.events[0].layers[0].details["sizes"], sizes)
    ids, mask, _ = left_padded([30, 21])
    dense = generate(model, ids, mask, tokens=4)
    fused.clear()
    with RetrievalPress(press.allocator, 64, **SMALL)(model), pytest.warns(UserWarning, match="fit the budget"):
        assert torch.equal(generate(model, ids, mask, tokens=4), dense)
    assert not fused


def test_a_stride_leaves_the_prompt_to_the_users_attention(llama, random_tokens, fused):
    ids = random_tokens(2, 30)
    with torch.no_grad():
        dense = llama(ids).logits
    press = RetrievalPress(CommunityRetrieval(top_k=3, edge_stride=2), 14, **SMALL)
    with press(llama) as run:
        logits, _ = step_through(llama, ids, [30])
        assert torch.equal(logits, dense)
        llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert run.bound and all(output is None for output in fused)


def test_a_mask_of_the_models_own_is_left_to_the_users_attention(llama, random_tokens, fused, monkeypatch):
    """The first tokens of the prompt see each other both ways; what finds edges knows causal attention only."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.create_causal_mask
    both_ways = lambda batch, head, query, key: key < 9
    masked = lambda **kwargs: plain(**kwargs, or_mask_function=both_ways)
    ids = random_tokens(1, 30)
    with torch.no_grad():
        causal = llama(ids).logits
        monkeypatch.setattr(modeling_llama, "create_causal_mask", masked)
        expected = llama(ids).logits
    assert not torch.allclose(causal, expected, atol=1e-3)
    with RetrievalPress(COMMUNITY, 14, **SMALL)(llama), torch.no_grad():
        assert torch.equal(llama(ids, use_cache=True).logits, expected)
    assert not fused


def test_another_attention_function_reads_the_prompt(llama, random_tokens, fused):
    ids = random_tokens(1, 30)
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        expected = llama(ids).logits
    with RetrievalPress(COMMUNITY, 14, **SMALL)(llama), torch.no_grad():
        assert torch.equal(llama(ids, use_cache=True).logits, expected)
    assert not fused
