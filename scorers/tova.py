"""TOVA: keep what the newest token attends to."""

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

from kvstitch.kernels.window_attention.api import window_usage
from kvstitch.scorers.base import Scorer
from kvstitch.scorers.options import check_choice
from kvstitch.views import LayerView, Needs

SHARES = ("layer", "group")


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the newest query to each token (TOVA, arXiv 2401.06104), asked once an event.

    `s_j = (1 / Q) sum_q softmax_j(scaling * q . k_j)` with the query at its own position, over all Q query heads of the
    layer: every head ranks a token alike. Heads that an allocator has let drift apart are matched by position, not by
    slot; a head that no longer holds a token pays it no attention.

    TOVA evicts one token a step; at an event every `interval` steps one query decides for many ("periodic TOVA").

    Args:
        share: "layer" averages over all query heads, "group" only over those that read the kv head.
    """

    share: str = "layer"

    def __post_init__(self):
        check_choice("share", self.share, SHARES)

    @property
    def needs(self) -> Needs:
        return Needs(queries=1)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """Probabilities; the newest token's own is among them."""
        newest = view.queries.last(1)
        by_head = window_usage(newest.rotated, newest.positions, view.keys, view.positions, view.scaling)
        return _mean_over_heads(by_head, view.positions) if self.share == "layer" else by_head


def _mean_over_heads(values: Float32[Tensor, "B H T"], positions: Int64[Tensor, "B H T"]) -> Float32[Tensor, "B H T"]:
    """Sum of the values that stand at the same position in any head of a row, divided by H."""
    batch, heads, slots = values.shape
    ordered, order = positions.flatten(1).sort(dim=1)
    run = ordered.new_zeros(batch, heads * slots)
    run[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
    # Float64 hides the order in which a GPU adds, so that equal runs give equal scores.
    sums = values.new_zeros(batch, heads * slots).double()
    sums.scatter_add_(1, run, values.flatten(1).double().gather(1, order))
    place = run.new_empty(batch, heads * slots).scatter_(1, order, run)
    return (sums.gather(1, place) / heads).float().view(batch, heads, slots)
