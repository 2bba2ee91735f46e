"""Tiny random models of six architectures, and a dense gold run in which evicted keys are masked out."""

from dataclasses import dataclass

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvstitch.allocators import EvictingAllocator, Selection
from kvstitch.scorers import Scorer

VOCABULARY = 97
_SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_WITH_DIM = _SHAPE | dict(head_dim=16)
_BUILDERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_WITH_DIM)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_WITH_DIM)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=None, **_WITH_DIM)),
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(
            **_SHAPE,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_WITH_DIM,
            sliding_window=12,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
}
ARCHITECTURES = tuple(_BUILDERS)


def build_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = _BUILDERS[name]().eval()
    for parameter in model.parameters():
        # Larger weights make attention sharp, so that a wrongly masked or rotated key shows.
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return build_model(request.param)


@pytest.fixture
def llama():
    return build_model("llama")


@pytest.fixture
def make_model():
    return build_model


@pytest.fixture
def model_shape():
    """Arguments of a configuration that all tiny models have."""
    return dict(_SHAPE)


@pytest.fixture
def random_tokens():
    """`random_tokens(batch, length, seed=0)` -> int64 `[batch, length]`, no padding."""

    def make(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def left_padded(random_tokens):
    """`left_padded(lengths)` -> rows of those lengths as (input_ids, attention_mask, list of single rows)."""

    def make(lengths: list[int], seed: int = 0):
        rows = [random_tokens(1, length, seed=seed + i) for i, length in enumerate(lengths)]
        width = max(lengths)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - row.shape[1] :] = row
            mask[i, width - row.shape[1] :] = 1
        return ids, mask, rows

    return make


@dataclass(frozen=True)
class KeyHash(Scorer):
    """A deterministic score without any meaning: depends on the stored key alone, so it needs no queries."""

    def score(self, view):
        return torch.sin(view.keys.float().sum(-1) * 7.0)


@dataclass(frozen=True)
class ShapedTopK(EvictingAllocator):
    """Best-scored slots plus the newest; `shape` says how counts differ: equal, per_layer or ragged (per row and head)."""

    num_sinks: int = 1
    num_recent: int = 1
    shape: str = "equal"

    def allocate(self, view, scores, keep, state):
        batch, heads, length = scores.shape
        largest = min(int(keep.max()), length)
        count = keep[:, None].expand(batch, heads)
        if self.shape == "per_layer":
            count = count - view.layer_idx % 3
        if self.shape == "ragged":
            count = count - (torch.arange(heads)[None] * 3 + torch.arange(batch)[:, None] + view.layer_idx) % 4
        rank_score = scores.masked_fill(~view.valid, -torch.inf)
        rank_score[..., -1] = torch.inf
        best = rank_score.topk(largest, dim=-1)
        kept = (torch.arange(largest) < count[..., None]) & (best.values > -torch.inf)
        slots = torch.where(kept, best.indices, length).sort(dim=-1).values
        slots = slots[..., : int(kept.sum(-1).max())]
        return Selection(torch.where(slots == length, -1, slots))


@pytest.fixture
def key_hash():
    return KeyHash()


@pytest.fixture
def shaped_topk():
    return ShapedTopK


def _gold_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) * scaling
    allowed = attention_mask.expand(logits.shape)
    visible = getattr(module, "gold_visible", None)
    if visible is not None:
        allowed = allowed & visible.repeat_interleave(groups, 1)
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.fixture
def gold_logits():
    """`gold_logits(model, ids, mask, events)` -> logits of one dense forward; a query at column i sees no key that an
    event at or before column i evicted."""

    def full_mask(*args, **kwargs):
        return ALL_MASKS["sdpa"](*args, **(kwargs | {"allow_is_causal_skip": False}))

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as ALL_MASKS

    def run(model, ids, mask, events):
        previous = model.config._attn_implementation
        AttentionInterface.register("gold", _gold_attention)
        AttentionMaskInterface.register("gold", full_mask)
        attention = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
        heads = model.config.num_key_value_heads
        batch, length = ids.shape
        padding = (mask == 0).sum(1)
        try:
            model.set_attn_implementation("gold")
            for index, module in attention.items():
                visible = torch.ones(batch, heads, length, length, dtype=torch.bool)
                for event in events:
                    for layer in event.layers:
                        if layer.layer_idx != index:
                            continue
                        columns = layer.positions + padding[:, None, None]
                        kept = torch.zeros(batch, heads, length + 1, dtype=torch.bool)
                        kept.scatter_(2, torch.where(layer.positions < 0, length, columns), True)
                        visible[:, :, event.seen_tokens :, : event.seen_tokens] &= kept[:, :, None, : event.seen_tokens]
                module.gold_visible = visible
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
            with torch.no_grad():
                return model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        finally:
            for module in attention.values():
                vars(module).pop("gold_visible", None)
            model.set_attn_implementation(previous)

    return run
