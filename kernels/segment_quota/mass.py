"""From window evidence and credit to the mass of every slot (AMS, arXiv 2605.23200); plain torch.

Sums over slots are the last entry of a running sum, which on a CPU adds in slot order: an empty slot adds an exact
zero, so a row with holes gets bit for bit what its valid slots alone would get. Float32 keeps the order of `Tensor.sum`
instead, because it exists to repeat the public code's rounding.
"""

import torch
from torch import Tensor

from kvstitch.kernels.segment_quota.rules import SegmentRules

# Keeps a slot without any evidence from weighing nothing; the public code's value.
_EPSILON = 1e-12


def mix_mass(usage: Tensor, credit: Tensor | None, valid: Tensor | None, rules: SegmentRules) -> tuple[Tensor, Tensor]:
    """Mass that segments and quotas are made from, and the credit after this event.

    `m = normalise(usage)`; `c <- decay * c + (1 - decay) * m`; `mass = normalise(mix * m + (1 - mix) * normalise(c))`.
    With `credit_scale="usage"` only the last of the three is normalised.

    Args:
        usage: `[B, H, T]`; what is negative or not finite counts as 0.
        credit: `[B, H, T' <= T]` after the previous event; None before the first.
        valid: `[B, H, T]` bool, or None if no slot is empty.

    Returns: mass and credit `[B, H, T]` in the rules' dtype, 0 on empty slots. Mass sums to 1 over a head's slots.
    """
    dtype = torch.float32 if rules.mass_dtype == "float32" else torch.float64
    now = usage.to(dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0)
    if not rules.credit:
        return _over_batch(_normalise_(now, valid), valid, rules), torch.zeros_like(now)
    if rules.credit_scale == "mass":
        _normalise_(now, valid)
    updated = _update_credit(now, credit, rules)
    history = updated.clone()
    if rules.credit_scale == "mass":
        _normalise_(history, valid)
    # Two products and a sum: the fused form rounds once less, and the public figures were made without it.
    mixed = now.mul_(rules.credit_mix).add_(history.mul_(1 - rules.credit_mix))
    return _over_batch(_normalise_(mixed, valid), valid, rules), updated


def _normalise_(x: Tensor, valid: Tensor | None) -> Tensor:
    """In place, because the first cost of a small operator is its result's memory."""
    x.add_(_EPSILON)
    if valid is not None:
        x.mul_(valid)
    total = x.sum(dim=-1, keepdim=True) if x.dtype == torch.float32 else x.cumsum(dim=-1)[..., -1:]
    # A head without any valid slot has no mass to share out.
    return x.div_(total if valid is None else total.clamp(min=_EPSILON))


def _update_credit(mass: Tensor, credit: Tensor | None, rules: SegmentRules) -> Tensor:
    decay = rules.credit_decay
    known = 0 if credit is None else credit.shape[-1]
    updated = mass * (1 - decay)
    if rules.credit_init == "mass":
        updated[..., known:] = mass[..., known:]
    if known:
        updated[..., :known].add_(decay * credit)
    return updated


def _over_batch(mass: Tensor, valid: Tensor | None, rules: SegmentRules) -> Tensor:
    if rules.batch == "per_sample" or mass.shape[0] == 1:
        return mass
    return _normalise_(mass.mean(dim=0, keepdim=True).expand_as(mass).clone(), valid)
