"""Expected Attention: keep what queries yet to come are expected to attend to."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from kvstitch.scorers.base import Scorer
from kvstitch.scorers.masking import softmax_over
from kvstitch.scorers.options import check_count, check_interval, check_switch
from kvstitch.scorers.rotation import average_turn, turn_back
from kvstitch.views import LayerView, Needs, QueryWindow

# Slots whose quadratic forms are held at once: [H, 4096, G * D] floats.
_SLOT_BLOCK = 4096


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Attention that a Gaussian fitted to recent queries will pay, times the value's norm (arXiv 2510.00636).

    The last queries are taken back to before RoPE and turned by the average rotation `R` of the next
    `num_future_positions` true positions; with their mean `m` and covariance `C` after that,
    `z_j = c k_j . m + c^2 / 2 k_j' C k_j` (c = the model's scaling), `e = softmax_j z`, mean over the G query heads,
    `s_j = (e_j + epsilon) |v_j|`. The spread of the rotation itself is not in C; the method is like that.

    The first `num_sinks` tokens of a row, known by their positions, are left out of the fit and of the softmax; their own
    e is their share of a softmax over all tokens.

    Differences from kvpress: true future positions (it starts them at the length of its query buffer), true sinks (it
    drops the first buffered queries and slots), the model's scaling, float32.

    Args:
        num_future_positions: positions averaged over, from the next one on.
        num_sinks: tokens left out.
        use_covariance: whether C takes part.
        use_value_norm: whether e is turned into s; if not, s = e.
        epsilon: added to e. 0 is the paper's and kvpress's default; 1e-2 is the "ExpE2" of the AMS comparisons.
        window_size: queries fitted; fewer if fewer are held.
    """

    num_future_positions: int = 512
    num_sinks: int = 4
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0
    window_size: int = 256

    def __post_init__(self):
        check_count("num_future_positions", self.num_future_positions, 1)
        check_count("num_sinks", self.num_sinks, 0)
        check_switch("use_covariance", self.use_covariance)
        check_switch("use_value_norm", self.use_value_norm)
        check_interval("epsilon", self.epsilon, 0, float("inf"), high_allowed=False)
        check_count("window_size", self.window_size, 1)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window_size, rotary=True)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """At least 0. A row without a query to fit is scored by its value norms alone."""
        logits = self._expected_logits(view)
        valid = view.valid[:, :, None]
        sink = valid & (view.positions[:, :, None] < self.num_sinks)
        expected = torch.where(sink, softmax_over(logits, valid), softmax_over(logits, valid & ~sink)).mean(dim=2)
        if self.use_value_norm:
            norms = torch.linalg.vector_norm(view.values.float(), dim=-1)
            expected = (expected + self.epsilon) * norms
        return expected.masked_fill(~view.valid, 0.0)

    def _expected_logits(self, view: LayerView) -> Float32[Tensor, "B H G T"]:
        batch, heads, _, dims = view.keys.shape
        window = view.queries.last(self.window_size)
        fitted = window.positions >= self.num_sinks
        weights = (fitted / fitted.sum(dim=1, keepdim=True).clamp(min=1))[:, None, :, None].float()

        queries = self._future_queries(view, window)
        queries = torch.where(fitted[:, None, :, None], queries, 0.0)
        mean = (queries * weights).sum(dim=2)
        keys = view.keys.float()
        logits = view.scaling * torch.matmul(mean.view(batch, heads, -1, dims), keys.mT)
        if self.use_covariance:
            centred = (queries - mean[:, :, None]) * weights.sqrt()
            covariance = torch.matmul(centred.mT, centred).view(batch, heads, -1, dims, dims)
            logits = logits + view.scaling**2 / 2 * _quadratic_forms(keys, covariance)
        return logits

    def _future_queries(self, view: LayerView, window: QueryWindow) -> Float32[Tensor, "B Q W D"]:
        """The window's queries, each turned from its own position to the average of the future ones."""
        rotary = view.rotary
        back = turn_back(rotary, window.positions)
        future = average_turn(rotary, view.next_position, self.num_future_positions)
        turned = rotary.from_complex(rotary.to_complex(window.rotated) * (back * future[:, None])[:, None])
        if rotary.rotated_dims == window.rotated.shape[-1]:
            return turned
        return torch.cat((turned, window.rotated[..., rotary.rotated_dims :].float()), dim=-1)


def _quadratic_forms(
    keys: Float32[Tensor, "B H T D"], matrices: Float[Tensor, "B H G D D"]
) -> Float32[Tensor, "B H G T"]:
    """`k' M k` for every slot and query head."""
    # One product per kv head: the G matrices side by side.
    beside = matrices.transpose(2, 3).flatten(3)
    forms = []
    for block in keys.split(_SLOT_BLOCK, dim=2):
        products = torch.matmul(block, beside).unflatten(3, (-1, keys.shape[-1]))
        forms.append(torch.linalg.vecdot(products, block[:, :, :, None]))
    return torch.cat(forms, dim=2).mT
