"""Random eviction, the floor that every method should clear."""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

from kvstitch.scorers.base import Scorer
from kvstitch.scorers.options import check_count
from kvstitch.views import LayerView

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Scorer):
    """A uniform number for each token, drawn from (seed, layer, position) and from nothing else.

    It does not depend on the order of calls, on padding, on the batch or on the head, and no generator is touched. A
    token keeps its number for life, so a top-k over many events leaves a uniform sample of everything seen, not of what
    was recent.

    Args:
        seed: at least 0.
    """

    seed: int = 0

    def __post_init__(self):
        check_count("seed", self.seed, 0)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """In [0, 1), a multiple of 2^-24."""
        key = _scramble(_scramble(self.seed & _WORD) ^ (self.seed >> 32) ^ view.layer_idx)
        bits = _scramble(view.positions.clamp(min=0) ^ key) >> 8
        return (bits.float() / 2**24).masked_fill(~view.valid, 0.0)


def _scramble(x: int | Tensor) -> int | Tensor:
    """A bijection of 32-bit words with little bias (the `lowbias32` constants of C. Wellons' hash prospector)."""
    # The low 32 bits of a product are right even where an int64 product wraps.
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
