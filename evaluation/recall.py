"""Attention mass recall of an evicting press: how much of what a query would attend to is still there.

Over all tokens that the pressed model has seen, the softmax of a query's logits says where it would look if nothing had been
evicted; its recall is the share of this that falls on positions which the cache still holds, its own token included. Query and
keys are the pressed model's own, those of evicted tokens as it once computed them: one query is asked about two sets of keys,
and nothing of the dense model's run enters. `RetrievalPress.measure_mass` asks the same of a retrieving press.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvstitch.evaluation.reads import WORST_SHARE
from kvstitch.evaluation.streams import now
from kvstitch.presses import EvictionPress, EvictionRun

# Attention of all query heads over the whole sequence is held for so many weights at once: 64 MiB in float32.
_BLOCK_WEIGHTS = 2**24


class RecallRun(EvictionRun):
    """An eviction run that keeps aside the keys of all tokens and asks evenly spaced queries about them. Batches of one.

    Args:
        press: at work.
        model: on which.
        queries: how many of the queries of a forward are asked, at most; 0: none, and no keys are kept aside. These are as
            many bytes as the dense model's keys, and count in the peak memory of process and GPU.
        first: position from which on queries are asked.
    """

    def __init__(self, press: EvictionPress, model: PreTrainedModel, queries: int, first: int):
        super().__init__(press, model)
        # What measuring took; the model's own time is without it.
        self.measuring_seconds = 0.0
        self.measuring = queries > 0
        self._queries = queries
        self._first = first
        self._softcap = getattr(self._facts.decoder.config, "attn_logit_softcapping", None)
        self._keys: dict[int, list[Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._asked: dict[int, int] = {}

    def observe_chunk(self, index, layer, query):
        self._ask(index, layer, query)
        return super().observe_chunk(index, layer, query)

    def decode(self, index, layer, query, scaling, extras):
        self._ask(index, layer, query)
        return super().decode(index, layer, query, scaling, extras)

    def recall(self) -> dict[str, float | None]:
        """`mass_recall`, the mean over queries, heads and layers, and `mass_recall_worst`, that of the tenth of query
        heads that have least; None if no query was asked."""
        means = [total / self._asked[index] for index, total in self._sums.items()]
        if not means:
            return {"mass_recall": None, "mass_recall_worst": None}
        heads = torch.cat(means).sort().values
        worst = heads[: max(1, round(WORST_SHARE * len(heads)))]
        return {"mass_recall": heads.mean().item(), "mass_recall_worst": worst.mean().item()}

    @torch.no_grad()
    def _ask(self, index: int, layer, query: Tensor) -> None:
        if not self.measuring:
            return
        start = now(query.device)
        count = query.shape[2]
        kept = self._keys.setdefault(index, [])
        kept.append(layer.keys[0, :, -count:].clone())
        seen = layer.seen_tokens
        asked = torch.arange(seen - count, seen)[max(0, self._first - (seen - count)) :]
        if len(asked):
            if len(kept) > 1:
                kept[:] = [torch.cat(kept, dim=1)]
            asked = asked[torch.linspace(0, len(asked) - 1, min(self._queries, len(asked))).round().long()]
            rows = query[0, :, asked - (seen - count)]
            scaling = self._facts.attention[index].scaling
            held = held_positions(layer.positions[0], seen)
            shares = mass_recall(rows, kept[0], held, asked.to(query.device), scaling, self._softcap)
            self._sums[index] = self._sums.get(index, 0) + shares.double().sum(dim=1).cpu()
            self._asked[index] = self._asked.get(index, 0) + len(asked)
        self.measuring_seconds += now(query.device) - start


def held_positions(positions: Int64[Tensor, "H T"], seen_tokens: int) -> Bool[Tensor, "H S"]:
    """Which of the positions of a sequence the slots of each head hold; -1 is none."""
    held = torch.zeros(positions.shape[0], seen_tokens + 1, dtype=torch.bool, device=positions.device)
    held.scatter_(1, torch.where(positions < 0, seen_tokens, positions), True)
    return held[:, :seen_tokens]


def mass_recall(
    query: Float[Tensor, "Q N D"],
    keys: Float[Tensor, "H S D"],
    held: Bool[Tensor, "H S"],
    places: Int64[Tensor, "N"],
    scaling: float,
    softcap: float | None = None,
) -> Float[Tensor, "Q N"]:
    """Share of each query's attention over all tokens up to its own that falls on held ones.

    Args:
        query: of all query heads, as they enter the attention; Q = H * G, neighbours share a kv head.
        keys: of all tokens, RoPE applied.
        held: which of them the cache still has.
        places: position of each query's own token.
        scaling: of the logits.
        softcap: of the logits, before the softmax.

    Returns: float32. What a learned sink takes counts to neither.
    """
    heads, seen, _ = keys.shape
    shares = []
    rows = max(1, _BLOCK_WEIGHTS // (query.shape[0] * seen))
    for part, own in zip(query.split(rows, dim=1), places.split(rows)):
        logits = part.float().reshape(heads, -1, part.shape[-1]) @ keys.float().transpose(-1, -2) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.view(query.shape[0], len(own), seen)
        future = torch.arange(seen, device=keys.device) > own[:, None]
        weights = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
        here = held.repeat_interleave(query.shape[0] // heads, dim=0)[:, None]
        shares.append((weights * here).sum(dim=-1))
    return torch.cat(shares, dim=1)
