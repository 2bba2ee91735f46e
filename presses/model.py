"""What a press must know of a model, found out and checked before anything runs."""

import inspect
from dataclasses import dataclass

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstitch.presses.rotary import UnsupportedModel, head_dim_of, read_rotary, require_fixed_frequencies
from kvstitch.presses.versions import cache_argument
from kvstitch.views import Needs, Rotary


@dataclass(frozen=True)
class ModelFacts:
    """The decoder of a model and its full-attention layers.

    Args:
        decoder: the module that loops over the layers and receives the cache.
        attention: attention module of each full-attention layer, by layer index.
        rotary: the RoPE of those layers.
        num_layers: all decoder layers, sliding-window layers included.
        num_query_heads: H * G.
        num_kv_heads: H.
        head_dim: D, those that RoPE leaves alone included.
        slot_bytes: full-attention layers by index, keys and values of one slot per kv head; None if the configuration does
            not tell the size of a head.
        cache_argument: name under which the decoder takes its cache.
        argument_names: positional parameters of the decoder's forward.
    """

    decoder: nn.Module
    attention: dict[int, nn.Module]
    rotary: Rotary
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    slot_bytes: dict[int, int] | None
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
    _refuse_latent_attention(model, modules[full[0]])
    if needs.rotary or needs.statistics:
        require_fixed_frequencies(decoder)
        _require_rope_everywhere(model, config, {index: modules[index] for index in full})
    parameters = inspect.signature(type(decoder).forward).parameters
    return ModelFacts(
        decoder=decoder,
        attention={index: modules[index] for index in full},
        rotary=read_rotary(decoder, modules[full[0]], "full_attention"),
        num_layers=len(layers),
        num_query_heads=config.num_attention_heads,
        num_kv_heads=_num_kv_heads(config),
        head_dim=head_dim_of(modules[full[0]]),
        slot_bytes=_slot_bytes(model, config, {index: modules[index] for index in full}),
        cache_argument=cache_argument(parameters),
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


def _refuse_latent_attention(model: PreTrainedModel, attention: nn.Module) -> None:
    if any(hasattr(attention, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")):
        raise UnsupportedModel(
            f"{type(model).__name__} uses latent attention (MLA), whose heads are rotated in a part of their own: not supported"
        )


def _require_rope_everywhere(model: PreTrainedModel, config, attention: dict[int, nn.Module]) -> None:
    """Scorers that turn vectors would turn those of layers that never were turned."""
    plain = [index for index, module in attention.items() if getattr(module, "use_rope", True) in (False, 0)]
    listed = getattr(config, "no_rope_layers", None) or []
    plain += [index for index in attention if index < len(listed) and listed[index] in (False, 0)]
    # These rotate in their sliding-window layers only, and say so nowhere.
    if type(model).__name__.startswith(("Cohere2", "Exaone4")) and getattr(config, "sliding_window", None) is not None:
        plain = list(attention)
    if plain:
        raise UnsupportedModel(
            f"layers {sorted(set(plain))} of {type(model).__name__} have no RoPE, so vectors cannot be turned to other "
            "positions there; use a scorer that reads attention (tova, snapkv) or keys (keydiff)"
        )


def _num_kv_heads(config) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _slot_bytes(model: PreTrainedModel, config, attention: dict[int, nn.Module]) -> dict[int, int] | None:
    sizes = {index: getattr(module, "head_dim", None) for index, module in attention.items()}
    if None in sizes.values():
        return None
    return {index: 2 * size * _num_kv_heads(config) * model.dtype.itemsize for index, size in sizes.items()}


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling") and hasattr(module, "config")
