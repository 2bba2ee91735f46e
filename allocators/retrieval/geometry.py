"""Distances between keys as queries feel them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

METRICS = ("euclidean", "queries")
# Later queries are more like those of the tokens to come: each counts 1 / 1024 less than the next one.
_FADING = 1 - 1 / 1024
# Share of the mean eigenvalue that is added to all, so that directions no query has looked in still count a little.
_RIDGE = 0.02


class QueryGeometry:
    """Turns keys so that Euclidean distance is the typical difference of their q.k.

    Two keys are alike if queries cannot tell them apart: E[(q.(k - k'))^2] = (k - k')^T E[q q^T] (k - k'), the expectation
    over the recent queries of the heads that share the key. With E[q q^T] = L L^T that is the distance of k^T L and k'^T L.
    """

    def __init__(self):
        self._moments: Tensor | None = None
        self._weight: Tensor | None = None

    def observe(self, query: Float[Tensor, "B Q N D"], positions: Int64[Tensor, "B H T"]) -> None:
        """Takes in the queries of a forward; how a prompt is cut into forwards, and padding, make no difference."""
        batch, heads = positions.shape[:2]
        count, dim = query.shape[2:]
        real = (positions[:, 0, -count:] >= 0).float()
        later = real.flip(1).cumsum(dim=1).flip(1) - real
        share = real * _FADING**later
        rows = query.float().masked_fill(real[:, None, :, None] == 0, 0.0).reshape(batch, heads, -1, dim)
        shares = share.repeat(1, query.shape[1] // heads)[:, None, :, None]
        moments, weight = rows.transpose(2, 3) @ (rows * shares), share.sum(dim=-1)
        if self._moments is None:
            self._moments, self._weight = moments, weight
        else:
            keep = _FADING ** real.sum(dim=-1)
            self._moments = self._moments * keep[:, None, None, None] + moments
            self._weight = self._weight * keep + weight

    def transform(self, keys: Float[Tensor, "N D"], row: int, head: int) -> Float32[Tensor, "N D"]:
        """Keys of one head, turned; as they are if no query was seen, or none that says anything."""
        keys = keys.float()
        if self._moments is None or not self._weight[row] > 0:
            return keys
        moment = self._moments[row, head].double() / self._weight[row]
        scale = moment.diagonal().mean()
        ridge = torch.eye(moment.shape[0], dtype=moment.dtype, device=moment.device) * _RIDGE
        factor, failed = torch.linalg.cholesky_ex(moment / scale + ridge)
        # Queries that hold NaN, or are all zero, tell nothing about distances.
        return keys if failed or factor.isnan().any() else keys @ factor.float()

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._moments is not None:
            self._moments, self._weight = function(self._moments), function(self._weight)

    @property
    def stored_bytes(self) -> int:
        return 0 if self._moments is None else self._moments.untyped_storage().nbytes()
