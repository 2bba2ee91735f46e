"""Between events a decode step waits for nothing, and allocates nothing that grows with the cache."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.allocators import GlobalTopK, SegmentQuota
from kvstitch.presses import EvictionPress
from kvstitch.presses import run as run_module
from kvstitch.scorers import TOVA, TriAttention

SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.unique", "aten.masked_select", "aten.equal")


class Watch(TorchDispatchMode):
    """Counts host syncs, operators, and the largest tensor that any operator allocates anew."""

    def __init__(self):
        super().__init__()
        self.syncs, self.operators, self.largest = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        self.operators += 1
        if name.startswith(SYNCS):
            self.syncs.append(name)
        given = (*args, *(kwargs or {}).values())
        inputs = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("shape", ["equal", "ragged"])
def test_a_step_between_events(llama, random_tokens, key_hash, shaped_topk, shape):
    seen = []
    for budget in (40, 300):
        ids = random_tokens(2, 340)
        press = EvictionPress(key_hash, shaped_topk(shape=shape), budget=budget, interval=100, compress_prompt=True)
        with press(llama) as run, torch.no_grad():
            cache = llama(ids, use_cache=True).past_key_values
            llama(ids[:, :1], past_key_values=cache)
            with Watch() as watch:
                for _ in range(3):
                    llama(ids[:, :1], past_key_values=cache)
            assert run.num_events == 1 and run.stored_tokens[0] == budget + 4
        assert watch.syncs == []
        seen.append((watch.operators, watch.largest))
    # Same work and same memory whether 44 or 304 slots are stored.
    assert seen[0] == seen[1]


@pytest.mark.parametrize("pad", [0, 9])
def test_a_step_with_a_mask(llama, random_tokens, key_hash, shaped_topk, pad, monkeypatch):
    """As `generate` gives it: read at once on a CPU; where reading means to wait, it is not looked at, to the same result."""
    ids = random_tokens(2, 340)
    whole = torch.ones(2, 350, dtype=torch.int64)
    whole[1, :pad] = 0
    logits = {}
    for waits in (False, True):
        if waits:
            monkeypatch.setattr(run_module, "_costs_no_wait", lambda mask: False)
        press = EvictionPress(key_hash, shaped_topk(), budget=40, interval=100, compress_prompt=True)
        with press(llama) as run, torch.no_grad():
            out = llama(ids, attention_mask=whole[:, :340], use_cache=True)
            logits[waits] = []
            for step in range(6):
                with Watch() as watch:
                    mask = whole[:, : 341 + step]
                    out = llama(ids[:, :1], attention_mask=mask, past_key_values=out.past_key_values)
                logits[waits].append(out.logits)
                if step:
                    assert watch.syncs == ([] if waits else ["aten._local_scalar_dense.default"])
            assert run.num_events == 1
    assert torch.equal(torch.cat(logits[True]), torch.cat(logits[False]))


FEW = dict(num_sinks=1, num_recent=2)
# What remembers queries, after how many tokens its ring has turned, and the queries of the largest tensor made then: the ring's, or
# the sixteen of every eighth and room for the others.
REMEMBERING = {
    "tova": (TOVA(), SegmentQuota(**FEW), 16, 16 + 1),
    "triattention": (TriAttention(), GlobalTopK(**FEW), 32, 32),
}
STEPS, ROWS, QUERY_HEADS, HEAD_DIM = 70, 2, 4, 16


def watched_steps(model, ids, press):
    """Operators and largest new tensor of each step after the first one, in which the prompt is compacted."""
    steps = []
    with press(model) as run, torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
        for _ in range(STEPS):
            with Watch() as watch:
                model(ids[:, :1], past_key_values=cache)
            assert watch.syncs == []
            steps.append((watch.operators, watch.largest))
    assert run.num_events == 1
    return steps


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_remember_queries(llama, random_tokens, name, dtype):
    """More steps than the ring of queries has room, so that it turns, and goes into the sums or is thinned out.

    In bfloat16 (and float16) a CPU is faster with an explicit softmax, whose logits stand in room that is made once.
    """
    model, ids = llama.to(dtype), random_tokens(ROWS, 340)
    scorer, allocator, ring, touched = REMEMBERING[name]
    runs = {}
    for budget in (40, 300):
        press = EvictionPress(scorer, allocator, budget=budget, interval=100, compress_prompt=True)
        runs[budget] = watched_steps(model, ids, press)
    usual = min(operators for operators, _ in runs[40])
    for steps in runs.values():
        # The only steps with more to do than the others are those in which the ring has turned.
        turns = [step for step, (operators, _) in enumerate(steps) if operators != usual]
        assert (
            turns and all(later - step == ring for step, later in zip(turns, turns[1:])) and len(turns) == STEPS // ring
        )
        for step, (_, largest) in enumerate(steps):
            new = ROWS * QUERY_HEADS * touched * HEAD_DIM if step in turns else 0
            assert largest <= max(new, runs[40][0][1])
    assert runs[40] == runs[300]


def test_a_step_has_no_work_per_head(make_model, random_tokens, key_hash, shaped_topk):
    counts = []
    for heads in (2, 4):
        torch.manual_seed(0)

        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=97, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
                num_key_value_heads=heads, head_dim=16, max_position_embeddings=128,
            )
        ).eval()  # fmt: skip
        press = EvictionPress(key_hash, shaped_topk(shape="ragged"), budget=12, interval=100, compress_prompt=True)
        ids = random_tokens(2, 30)
        with press(model), torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            model(ids[:, :1], past_key_values=cache)
            with Watch() as watch:
                model(ids[:, :1], past_key_values=cache)
        counts.append(watch.operators)
    assert counts[0] == counts[1]
