"""SnapKV: keep what the last queries attend to, smoothed along the sequence."""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

from kvstitch.kernels.window_attention.api import window_usage
from kvstitch.scorers.base import Scorer
from kvstitch.scorers.options import check_choice, check_count
from kvstitch.scorers.pooling import EDGES, average_pool
from kvstitch.views import LayerView, Needs


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Mean attention of the last W queries to each token, average-pooled (SnapKV, arXiv 2404.14469).

    `u_j = mean_w softmax_j(scaling * q_w . k_j)`, causal, each query at its own position; the mean is over the queries
    that see j. Before the window that is the paper's mean; the window's own tokens, which the paper always keeps and
    never scores, are scored like the others. Then the mean over the G query heads and an average over neighbours.

    Args:
        window_size: queries; fewer if fewer are held.
        kernel_size: odd width of the pooling, 1 for none.
        edges: divisor at the first and last tokens: "valid" counts the taps that exist; "zero" always `kernel_size`,
            as published, which takes up to 3/5 off the scores of the first two tokens, the sinks.
    """

    window_size: int = 64
    kernel_size: int = 5
    edges: str = "valid"

    def __post_init__(self):
        check_count("window_size", self.window_size, 1)
        check_count("kernel_size", self.kernel_size, 1, odd=True)
        check_choice("edges", self.edges, EDGES)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window_size)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """Probabilities, 0 for a token that no query can see."""
        window = view.queries.last(self.window_size)
        usage = window_usage(window.rotated, window.positions, view.keys, view.positions, view.scaling)
        return average_pool(usage, view.valid, self.kernel_size, self.edges).masked_fill(~view.valid, 0.0)
