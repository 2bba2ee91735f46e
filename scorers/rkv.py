"""R-KV: attention importance against redundancy among keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from kvstitch.kernels.redundancy.api import key_redundancy
from kvstitch.scorers.base import Scorer
from kvstitch.scorers.masking import LOWEST
from kvstitch.scorers.options import check_choice, check_count, check_interval
from kvstitch.scorers.pooling import max_pool
from kvstitch.views import LayerView, Needs, QueryWindow

GQA_MODES = ("max_logit", "mean_prob")
SCOPES = ("all", "history")


@dataclass(frozen=True)
class RKV(Scorer):
    """Importance minus redundancy, `s = mix_lambda * I - (1 - mix_lambda) * r` (R-KV, arXiv 2505.24133).

    The history is every token older than the window of the last queries. I: softmax over the history of the window's
    logits, mean over the window, maximum over `kernel_size` neighbours of the history. r: `kernels.redundancy`; among
    similar keys the newest is not held redundant. The window's own tokens, which R-KV always keeps and never scores,
    get their weight relative to the history, at most 1 and not pooled, as I.

    Differences from the public code: true positions, float32 throughout, rows of a batch apart, and a key without a
    similar one takes nothing off token 0.

    Args:
        mix_lambda: weight of the importance; the authors' README says 0.1, their code 0.07.
        window_size: queries; fewer if fewer are held.
        kernel_size: odd width of the maximum, 1 for none.
        similarity_threshold: cosine above which two keys are similar, in [0, 1).
        gqa: "max_logit" takes the largest logit of a group before the softmax (authors), "mean_prob" the mean of the
            query heads' probabilities after it (port of the AMS authors).
        sim_scope: keys among which redundancy is measured: "all" (authors) or "history" (port; r = 0 in the window).
    """

    mix_lambda: float = 0.1
    window_size: int = 8
    kernel_size: int = 7
    similarity_threshold: float = 0.5
    gqa: str = "max_logit"
    sim_scope: str = "all"

    def __post_init__(self):
        check_interval("mix_lambda", self.mix_lambda, 0, 1)
        check_count("window_size", self.window_size, 1)
        check_count("kernel_size", self.kernel_size, 1, odd=True)
        check_interval("similarity_threshold", self.similarity_threshold, 0, 1, high_allowed=False)
        check_choice("gqa", self.gqa, GQA_MODES)
        check_choice("sim_scope", self.sim_scope, SCOPES)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window_size)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """In [mix_lambda - 1, mix_lambda]; memory grows linearly with T."""
        window = view.queries.last(self.window_size)
        # A row without any query has nothing but history.
        oldest = window.positions.masked_fill(~window.valid, torch.iinfo(torch.int64).max).amin(dim=1)
        history = view.valid & (view.positions < oldest[:, None, None])

        importance = self._importance(view, window, history)
        pooled = max_pool(importance.masked_fill(~history, float("-inf")), view.valid, self.kernel_size)
        importance = torch.where(history, pooled, importance)

        members = view.valid if self.sim_scope == "all" else history
        redundancy = key_redundancy(view.keys, members, self.similarity_threshold)
        mixed = self.mix_lambda * importance - (1 - self.mix_lambda) * redundancy
        return mixed.masked_fill(~view.valid, 0.0)

    def _importance(
        self, view: LayerView, window: QueryWindow, history: Bool[Tensor, "B H T"]
    ) -> Float32[Tensor, "B H T"]:
        """Weight of each token relative to the whole history, capped at 1, mean over the queries that see it."""
        batch, heads, _, dims = view.keys.shape
        queries = window.rotated.float().reshape(batch, heads, -1, dims)
        logits = torch.matmul(queries, view.keys.float().mT) * view.scaling
        logits = logits.unflatten(2, (-1, window.positions.shape[1]))
        if self.gqa == "max_logit":
            logits = logits.amax(dim=2, keepdim=True)

        whole = logits.masked_fill(~history[:, :, None, None], LOWEST).logsumexp(dim=-1, keepdim=True)
        share = (logits - whole).clamp(max=0).exp().mean(dim=2)

        seen = view.valid[:, :, None] & (view.positions[:, :, None] <= window.positions[:, None, :, None])
        return torch.where(seen, share, 0.0).sum(dim=2) / seen.sum(dim=2).clamp(min=1)
