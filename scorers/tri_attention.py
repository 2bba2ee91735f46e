"""TriAttention: keep the keys that a static model of each head's queries points at."""

from dataclasses import dataclass
from os import PathLike

import torch
from jaxtyping import Bool, Complex64, Float32
from torch import Tensor

from kvstitch.scorers.base import Scorer
from kvstitch.scorers.masking import without_empty
from kvstitch.scorers.options import check_choice, check_count, check_interval, check_switch
from kvstitch.scorers.rotation import turns
from kvstitch.scorers.tri_attention_statistics import TriAttentionStatistics
from kvstitch.views import LayerView, Needs, QueryStatistics, Rotary

AGGREGATES = ("mean", "max")

# Fewer say too little about where a head's queries point.
_LEAST_QUERIES = 16


@dataclass(frozen=True)
class TriAttention(Scorer):
    """Keys scored by mean queries per frequency, over geometric future distances (TriAttention, arXiv 2604.04921).

    With m_f the mean and a_f the mean modulus of a query head's pre-RoPE queries at frequency f, and E the powers of two
    up to `offset_max`: `s_j = mean_e Re sum_f m_f exp(i w_f (t + e)) conj(k_jf) + sum_f (a_f - |m_f|) |k_jf|`, t the next
    position, k the cached key after RoPE ("baked form": no position of any token and no inverse RoPE is needed). Then a
    z-score per query head over the valid slots and the largest (or the mean) over the G query heads.

    m and a come from the row itself by default, from all queries seen so far. Dims that the model does not rotate count
    as planes of frequency 0.

    Args:
        aggregate: over the distances, "mean" (published default) or "max".
        gqa: over the query heads of a group, "max" (published) or "mean".
        offset_max: largest distance considered, in tokens.
        statistics: None, or offline statistics (or the path of their safetensors file). Heads that they lack use the
            row's own.
        shrinkage_tokens: with `statistics` only. None: the file alone; a number n0 mixes the row's own statistics of n
            queries in, with weight n / (n + n0) (256 is a good n0).
        debias: whether the row's own |m_f|^2 is freed of the expected square of its sampling error; no matter from 64
            queries on.
    """

    aggregate: str = "mean"
    gqa: str = "max"
    offset_max: int = 65536
    statistics: TriAttentionStatistics | str | PathLike | None = None
    shrinkage_tokens: float | None = None
    debias: bool = True

    def __post_init__(self):
        check_choice("aggregate", self.aggregate, AGGREGATES)
        check_choice("gqa", self.gqa, AGGREGATES)
        check_count("offset_max", self.offset_max, 1)
        check_switch("debias", self.debias)
        if self.shrinkage_tokens is not None:
            check_interval("shrinkage_tokens", self.shrinkage_tokens, 0, float("inf"), high_allowed=False)
            if self.statistics is None:
                raise ValueError(
                    f"shrinkage_tokens={self.shrinkage_tokens} needs statistics to shrink towards; give statistics=PATH "
                    "or leave shrinkage_tokens=None"
                )
        if isinstance(self.statistics, (str, PathLike)):
            object.__setattr__(self, "statistics", TriAttentionStatistics.load(self.statistics))
        elif not (self.statistics is None or isinstance(self.statistics, TriAttentionStatistics)):
            raise TypeError(
                f"statistics must be a TriAttentionStatistics, the path of its file or None, got {self.statistics!r}"
            )

    @property
    def needs(self) -> Needs:
        alone = self.statistics is not None and self.shrinkage_tokens is None and self.statistics.complete
        return Needs(statistics=not alone, rotary=True)

    def waits(self, view: LayerView) -> Bool[Tensor, "B"] | None:
        """Rows with fewer than 16 queries in their statistics, unless a file knows every head."""
        # A head that a file lacks has nothing but the row's own queries.
        if self.statistics is not None and self.statistics.complete:
            return None
        return view.statistics.count < _LEAST_QUERIES

    def check_model(
        self, rotary: Rotary, num_layers: int, num_query_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Offline statistics must be those of a model of this shape and RoPE."""
        if self.statistics is not None:
            self.statistics.check(rotary, num_layers, num_query_heads, num_kv_heads, head_dim)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """A z-score (mean 0 and deviation 1 per query head, before the group); 0 for all while no query is known."""
        mean, modulus = self._query_model(view)
        raw = self._raw_scores(view, mean, modulus - mean.abs())
        valid = view.valid[:, :, None]
        count = valid.sum(dim=-1, keepdim=True).clamp(min=1)
        centred = (raw - raw.sum(dim=-1, keepdim=True) / count).masked_fill(~valid, 0.0)
        deviation = (centred.square().sum(dim=-1, keepdim=True) / count).sqrt().clamp(min=1e-6)
        normal = centred / deviation
        return normal.amax(dim=2) if self.gqa == "max" else normal.mean(dim=2)

    def _raw_scores(
        self, view: LayerView, mean: Complex64[Tensor, "B Q F"], spread: Float32[Tensor, "B Q F"]
    ) -> Float32[Tensor, "B H G T"]:
        """Two products: rotated keys with the mean queries of the future, key moduli with the unexplained moduli."""
        rotary = view.rotary
        batch, heads = view.keys.shape[:2]
        keys = without_empty(view.keys, view.valid)
        # Logits carry the RoPE's scaling twice where they turn; keys bring it once, and not at all where they do not.
        scale = _like_planes(rotary.attention_scaling, rotary, mean)
        planes = rotary.all_planes(keys)
        spread_part = torch.matmul(
            (spread * scale).view(batch, heads, -1, spread.shape[-1]), torch.hypot(planes.real, planes.imag).mT
        )

        exponents = torch.arange(self.offset_max.bit_length(), device=keys.device)
        futures = turns(rotary, view.next_position, 2**exponents)
        if self.aggregate == "mean":
            futures = futures.mean(dim=1, keepdim=True)
        pointing = _pointing(rotary, mean * scale, futures).reshape(batch, heads, -1, keys.shape[-1])
        trig = torch.matmul(pointing, keys.mT).unflatten(2, (-1, futures.shape[1])).amax(dim=3)
        return trig + spread_part

    def _query_model(self, view: LayerView) -> tuple[Complex64[Tensor, "B Q F"], Float32[Tensor, "B Q F"]]:
        """Mean query and mean modulus per frequency, from the row, the file, or both."""
        if self.statistics is None:
            return _own_model(view.statistics, self.debias)
        batch, heads, _, head_dim = view.keys.shape
        # A press has asked before; a view may come from anywhere.
        self.check_model(view.rotary, view.num_layers, self.statistics.mean.shape[1], heads, head_dim)
        mean, modulus, covered = self.statistics.layer(view.layer_idx, view.keys.device)
        if not self.needs.statistics:
            return mean.expand(batch, -1, -1), modulus.expand(batch, -1, -1)

        own_mean, own_modulus = _own_model(view.statistics, self.debias)
        own_weight = torch.zeros_like(view.statistics.count, dtype=torch.float32)
        if self.shrinkage_tokens is not None:
            seen = view.statistics.count.float()
            own_weight = seen / (seen + self.shrinkage_tokens).clamp(min=1)
        own_weight = torch.where(covered, own_weight[:, None, None], 1.0)
        return torch.lerp(mean, own_mean, own_weight.to(own_mean.dtype)), torch.lerp(modulus, own_modulus, own_weight)


def _like_planes(turning: float, rotary: Rotary, planes: Tensor) -> Float32[Tensor, "F"]:
    """`turning` for the planes that RoPE turns, 1 for the others."""
    factors = planes.real.new_ones(planes.shape[-1])
    factors[: len(rotary.inverse_frequencies)] = turning
    return factors


def _pointing(
    rotary: Rotary, mean: Complex64[Tensor, "B Q F"], futures: Complex64[Tensor, "B E F2"]
) -> Float32[Tensor, "B Q E D"]:
    """The mean query at each future distance: a distance more is a row more of the same product."""
    turning = futures.shape[-1]
    turned = rotary.from_complex(mean[:, :, None, :turning] * futures[:, None])
    still = mean[:, :, None, turning:]
    still = torch.cat((still.real, still.imag), dim=-1).expand(-1, -1, futures.shape[1], -1)
    return torch.cat((turned, still), dim=-1)


def _own_model(
    statistics: QueryStatistics, debias: bool
) -> tuple[Complex64[Tensor, "B Q F"], Float32[Tensor, "B Q F"]]:
    count = statistics.count.clamp(min=1)[:, None, None]
    mean, modulus = statistics.total / count, statistics.modulus / count
    if debias:
        # The squared length of a sample mean is too long by its variance, E|q|^2 - |m|^2 over n - 1.
        length = torch.hypot(mean.real, mean.imag)
        variance = (statistics.square / count - length.square()) / (count - 1).clamp(min=1)
        true_length = (length.square() - variance).clamp(min=0).sqrt()
        mean = mean * (true_length / length.clamp(min=torch.finfo(torch.float32).tiny))
    return mean, modulus
