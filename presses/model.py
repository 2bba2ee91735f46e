"""What a press must know of a model, found out and checked before anything runs."""

import inspect
from dataclasses import dataclass

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstitch.presses.rotary import UnsupportedModel, read_rotary, require_fixed_frequencies
from kvstitch.views import Needs, Rotary

# The argument that carries the cache through the decoder was renamed in transformers 5.24.
CACHE_ARGUMENTS = ("past_key_values", "cache")


@dataclass(frozen=True)
class ModelFacts:
    """The decoder of a model and its full-attention layers.

    Args:
        decoder: the module that loops over the layers and receives the cache.
        attention: attention module of each full-attention layer, by layer index.
        rotary: the RoPE of those layers.
        num_layers: all decoder layers, sliding-window layers included.
        num_kv_heads: H.
        cache_argument: name under which the decoder takes its cache.
        argument_names: positional parameters of the decoder's forward.
    """

    decoder: nn.Module
    attention: dict[int, nn.Module]
    rotary: Rotary
    num_layers: int
    num_kv_heads: int
    cache_argument: str
    argument_names: tuple[str, ...]

    @property
    def num_sliding_layers(self) -> int:
        return self.num_layers - len(self.attention)


def read_model(model: PreTrainedModel, needs: Needs) -> ModelFacts:
    """Find decoder, attention modules and RoPE.

    Raises:
        TypeError: not a transformers model.
        UnsupportedModel: an architecture whose cache a press would get wrong, with the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a press works on a transformers PreTrainedModel, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    _refuse_architecture(model, config)
    decoder = model.get_decoder()
    layers = DynamicCache(config=config).layers
    full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    others = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if others:
        raise UnsupportedModel(
            f"{type(model).__name__} caches {', '.join(sorted(others))}: only full and sliding-window attention is supported"
        )
    if not full:
        raise UnsupportedModel(
            f"every layer of {type(model).__name__} has a sliding window, so its cache is bounded already: there is no "
            "full-attention layer to compress"
        )
    modules = {module.layer_idx: module for module in decoder.modules() if _is_attention(module)}
    missing = [index for index in full if index not in modules]
    if missing:
        raise UnsupportedModel(
            f"found no attention module with a scaling for layers {missing} of {type(decoder).__name__}"
        )
    if needs.rotary or needs.statistics:
        require_fixed_frequencies(decoder)
    parameters = inspect.signature(type(decoder).forward).parameters
    return ModelFacts(
        decoder=decoder,
        attention={index: modules[index] for index in full},
        rotary=read_rotary(decoder, modules[full[0]], "full_attention"),
        num_layers=len(layers),
        num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        cache_argument=next((name for name in reversed(CACHE_ARGUMENTS) if name in parameters), CACHE_ARGUMENTS[0]),
        argument_names=tuple(parameters)[1:],
    )


def _refuse_architecture(model: PreTrainedModel, config) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model: kvstitch compresses decoder-only models")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{name} does not call its attention through transformers' attention interface, so a press cannot take hold"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(
            f"the last layers of {name} read the keys of earlier ones; evicting there is not supported"
        )
    if model.training:
        raise UnsupportedModel(f"{name} is in training mode: call model.eval() first, a press serves inference")


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling") and hasattr(module, "config")
