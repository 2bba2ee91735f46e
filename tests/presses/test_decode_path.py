"""Between events a decode step waits for nothing, and allocates nothing that grows with the cache."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.presses import EvictionPress

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
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
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
