"""What the pressed model's run lost against the dense model's on the same tokens, and what its cache still covers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from kvstitch.evaluation.summary import summarise

__all__ = [
    "REGION_TOKENS",
    "NonFiniteLogits",
    "TokenComparison",
    "compare_tokens",
    "repetition_rate",
    "retained_iou",
    "summarise",
    "token_nll",
    "wiped_regions",
]

REGION_TOKENS = 64
# Rows whose log-probabilities are held in float32 at once: 64 x 150,000 words are 40 MB a copy.
_BLOCK_ROWS = 64


class NonFiniteLogits(ArithmeticError):
    """A model returned NaN or infinities where a prediction was wanted; the sample says nothing about the method."""


@dataclass(frozen=True)
class TokenComparison:
    """One value a predicted token, on the CPU.

    Args:
        kl: KL(dense || pressed) of the next-token distributions, nats.
        agreement: 1 where both models' most likely token is the same.
        nll: the pressed model's negative log-likelihood of the token that really came, nats.
        dense_nll: the dense model's.
    """

    kl: Float[Tensor, "N"]
    agreement: Float[Tensor, "N"]
    nll: Float[Tensor, "N"]
    dense_nll: Float[Tensor, "N"]

    @classmethod
    def join(cls, parts: Sequence["TokenComparison"]) -> "TokenComparison":
        """The tokens of all parts in order."""
        if not parts:
            return cls(*(torch.empty(0) for _ in cls.__dataclass_fields__))
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


@torch.no_grad()
def compare_tokens(
    dense: Float[Tensor, "N V"], pressed: Float[Tensor, "N V"], targets: Int64[Tensor, "N"]
) -> TokenComparison:
    """Compare two models' logits for the same N tokens of known continuation.

    Args:
        dense: logits of the dense model, any float dtype; taken to float32 in blocks of rows.
        pressed: logits of the pressed model.
        targets: the token that followed.

    Raises:
        NonFiniteLogits: on either side.
    """
    parts = []
    for start in range(0, dense.shape[0], _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        log_dense, log_pressed = (logits[rows].float().log_softmax(-1) for logits in (dense, pressed))
        # A word that the dense model rules out adds nothing, but 0 times -inf is not 0.
        terms = log_dense.exp() * (log_dense - log_pressed)
        terms = terms.masked_fill_(log_dense == -math.inf, 0.0)
        target = targets[rows, None].to(log_dense.device)
        parts.append(
            TokenComparison(
                kl=terms.double().sum(-1).float().cpu(),
                agreement=(log_dense.argmax(-1) == log_pressed.argmax(-1)).float().cpu(),
                nll=-log_pressed.gather(1, target)[:, 0].cpu(),
                dense_nll=-log_dense.gather(1, target)[:, 0].cpu(),
            )
        )
    comparison = TokenComparison.join(parts)
    for side, values in (("dense", comparison.dense_nll), ("pressed", comparison.nll), ("pressed", comparison.kl)):
        _require_finite(side, values)
    return comparison


@torch.no_grad()
def token_nll(logits: Float[Tensor, "N V"], targets: Int64[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Negative log-likelihood of what really came, nats, float32 on the CPU; for a model run alone.

    Raises:
        NonFiniteLogits: among the logits.
    """
    targets = targets.to(logits.device)
    blocks = [
        nn.functional.cross_entropy(rows.float(), wanted, reduction="none").cpu()
        for rows, wanted in zip(logits.split(_BLOCK_ROWS), targets.split(_BLOCK_ROWS))
    ]
    nll = torch.cat(blocks) if blocks else torch.empty(0)
    _require_finite("dense", nll)
    return nll


def _require_finite(side: str, values: Float[Tensor, "N"]) -> None:
    if not values.isfinite().all():
        raise NonFiniteLogits(f"the {side} model's logits are not finite")


def wiped_regions(
    kept: Int64[Tensor, "B H K"], seen_tokens: int, region_tokens: int = REGION_TOKENS
) -> Float[Tensor, "B H"]:
    """Share of regions of the original sequence that have no slot left (region wipe-out, AMS, arXiv 2605.23200, app. C).

    Regions are `region_tokens` wide, counted from position 0; the last one may be shorter.

    Args:
        kept: logical position of each slot, -1 where it is empty.
        seen_tokens: length of the original sequence.
    """
    regions = math.ceil(seen_tokens / region_tokens)
    # An empty slot falls into an extra region that is cut off again.
    region = torch.where(kept < 0, regions, kept // region_tokens)
    covered = torch.zeros(*kept.shape[:2], regions + 1, dtype=torch.bool, device=kept.device)
    covered.scatter_(2, region, True)
    return 1.0 - covered[..., :regions].float().mean(-1)


def retained_iou(
    before: Int64[Tensor, "B H K1"], after: Int64[Tensor, "B H K2"], seen_tokens: int
) -> Float[Tensor, "B H"]:
    """Intersection over union of the positions kept at two successive events; 1 if nothing changed.

    Args:
        before: positions kept at the earlier event, -1 where empty.
        after: at the later one.
        seen_tokens: more than any position.
    """
    first, second = _membership(before, seen_tokens), _membership(after, seen_tokens)
    return (first & second).sum(-1) / (first | second).sum(-1)


def _membership(positions: Int64[Tensor, "B H K"], size: int) -> Bool[Tensor, "B H S"]:
    member = torch.zeros(*positions.shape[:2], size + 1, dtype=torch.bool, device=positions.device)
    member.scatter_(2, torch.where(positions < 0, size, positions), True)
    return member[..., :size]


def repetition_rate(token_ids: Sequence[int], n: int = 4) -> float | None:
    """Share of n-grams that stood in the text before: 1 - distinct / all (seq-rep-n, arXiv 1908.04319, section 3).

    0 if no n tokens come twice in a row; near 1 for a model that is caught in a loop. None with fewer than `n` tokens.
    """
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else None
