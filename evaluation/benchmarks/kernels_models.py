"""Shapes of the models that the kernels are timed for, and models of those shapes with random weights."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config


@dataclass(frozen=True)
class ModelShape:
    """As in the model's published `config.json`.

    Args:
        family: "qwen3" or "llama".
        num_layers, hidden_size, intermediate_size, vocab_size: as named.
        num_query_heads, num_kv_heads, head_dim: of its attention.
        tied: whether the output layer is the embedding.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool

    @property
    def attention(self) -> tuple[int, int, int]:
        """Query heads, kv heads and head dim: all that an operator sees of the model."""
        return self.num_query_heads, self.num_kv_heads, self.head_dim

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one token in all layers, two bytes a number."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def weight_bytes(self) -> int:
        """Of all weights that are large, two bytes a number."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_query_heads + self.num_kv_heads)
        layers = self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
        return 2 * (layers + (1 if self.tied else 2) * self.vocab_size * self.hidden_size)


SHAPES = {
    "qwen3-4b": ModelShape("qwen3", 36, 2560, 9728, 151936, 32, 8, 128, True),
    "qwen3-8b": ModelShape("qwen3", 36, 4096, 12288, 151936, 32, 8, 128, False),
    "qwen3-14b": ModelShape("qwen3", 40, 5120, 17408, 151936, 40, 8, 128, False),
    "llama-3.1-8b": ModelShape("llama", 32, 4096, 14336, 128256, 32, 8, 128, False),
    # For machines without a GPU: shows that everything runs, and nothing else.
    "tiny": ModelShape("llama", 2, 32, 48, 64, 4, 2, 16, False),
}


def random_model(shape: ModelShape, positions: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model of that shape for `positions` tokens, its weights drawn on the device; nothing is fetched."""
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[shape.family]
    config = kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_query_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()
