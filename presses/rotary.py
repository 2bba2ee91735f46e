"""Reads the RoPE of a live model, and proves by calling the model's own code that it was read right."""

import sys

import torch
from torch import Tensor, nn

from kvstitch.views import Rotary

# Their frequencies change with the length of the sequence, so a key does not tell at which frequencies it was turned.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_PROBE_POSITIONS = (0, 1, 2, 37, 1023)


class UnsupportedModel(NotImplementedError):
    """The model has something that a press would get silently wrong."""


def read_rotary(decoder: nn.Module, attention: nn.Module, layer_type: str) -> Rotary:
    """The RoPE of the attention modules of one layer type.

    Raises:
        UnsupportedModel: no RoPE was found, or ours does not reproduce what the model's own functions compute.
    """
    name = type(decoder).__name__
    module = _find_embedding(decoder)
    if module is None:
        raise UnsupportedModel(f"{name} has no rotary embedding module: kvstitch needs a model with RoPE")
    own = hasattr(module, f"{layer_type}_inv_freq")
    prefix = f"{layer_type}_" if own else ""
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    if frequencies is None:
        raise UnsupportedModel(f"{type(module).__name__} of {name} shows no inverse frequencies")
    modeling = sys.modules[type(attention).__module__]
    apply = getattr(modeling, "apply_rotary_pos_emb", None)
    if apply is None:
        raise UnsupportedModel(f"{modeling.__name__} has no apply_rotary_pos_emb: kvstitch cannot check its RoPE")
    positions = torch.tensor([_PROBE_POSITIONS], device=frequencies.device)
    probe = torch.randn(1, 1, len(_PROBE_POSITIONS), head_dim_of(attention), generator=torch.Generator().manual_seed(0))
    probe = probe.to(frequencies.device)
    cos, sin = module(probe, positions, **({"layer_type": layer_type} if own else {}))
    expected = _model_rotation(apply, probe, cos, sin)
    scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    for interleaved in (False, True):
        rotary = Rotary(frequencies.double(), scaling, interleaved)
        if expected is not None and torch.allclose(rotary.rotate(probe, positions), expected, atol=1e-3, rtol=1e-3):
            return rotary
    raise UnsupportedModel(
        f"the RoPE of {name} is not one that kvstitch understands: neither the half-split nor the interleaved layout with "
        "the model's frequencies reproduces what its apply_rotary_pos_emb computes"
    )


def require_fixed_frequencies(decoder: nn.Module) -> None:
    """Refuse scorers that turn vectors to other positions on a RoPE whose frequencies depend on the length."""
    kinds = getattr(_find_embedding(decoder), "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind in _LENGTH_DEPENDENT:
            raise UnsupportedModel(
                f"the {kind!r} RoPE of {type(decoder).__name__} changes its frequencies with the length of the sequence, so "
                "queries cannot be turned to other positions; use a scorer that reads attention (tova, snapkv) or keys "
                "(keydiff) instead"
            )


def _find_embedding(decoder: nn.Module) -> nn.Module | None:
    direct = getattr(decoder, "rotary_emb", None)
    if direct is not None:
        return direct
    return next((m for m in decoder.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)


def head_dim_of(attention: nn.Module) -> int:
    """Dims of one head of an attention module, whether or not RoPE turns all of them."""
    config = attention.config
    dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    return dim or config.hidden_size // config.num_attention_heads


def _model_rotation(apply, probe: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """What the model makes of `probe`, dims that it does not rotate included; None if its function takes other arguments."""
    rotated_dims = cos.shape[-1]
    try:
        return apply(probe, probe, cos, sin)[0]
    except RuntimeError:
        # Some models cut off the dims that are not rotated before the call (GLM-like partial rotary).
        turned = apply(probe[..., :rotated_dims], probe[..., :rotated_dims], cos, sin)[0]
        return torch.cat((turned, probe[..., rotated_dims:]), dim=-1)
    except TypeError:
        return None
