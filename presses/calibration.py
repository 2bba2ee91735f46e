"""Running sums over the queries of a text, for scorers whose picture of a model's queries is taken beforehand."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstitch.presses.run import Run
from kvstitch.views import Needs, QueryStatistics, Rotary


def collect_query_statistics(
    model: PreTrainedModel, token_ids: Tensor, chunk_tokens: int = 512
) -> tuple[list[QueryStatistics | None], Rotary]:
    """Feed a text to the dense model and sum up its pre-RoPE queries.

    The queries are taken where attention receives them, so q-norm, fused projections and the model's own RoPE need no
    code of their own. The first four tokens of the text are left out.

    Args:
        model: in eval mode.
        token_ids: `[1, N]`.
        chunk_tokens: tokens per forward; queries are not stored beyond their chunk.

    Returns: one entry a decoder layer, None for a sliding-window layer; and the RoPE that the queries were freed of.

    Raises:
        UnsupportedModel: a RoPE that cannot be undone.
    """
    needs = Needs(statistics=True, rotary=True)
    run = Run("calibration", model, needs, growth_tokens=chunk_tokens)
    cache = None
    with run, torch.no_grad():
        for chunk in token_ids.to(model.device).split(chunk_tokens, dim=1):
            cache = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    layers: list[QueryStatistics | None] = [None] * run.num_layers
    for index, layer in run.layers.items():
        layers[index] = layer.query_memory.statistics()
    return layers, run.rotary
