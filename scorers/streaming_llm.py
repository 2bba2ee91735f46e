"""StreamingLLM: keep the first tokens and the most recent ones."""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

from kvstitch.scorers.base import Scorer
from kvstitch.views import LayerView


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """Recency, which makes a global top-k with `num_sinks` sinks exactly StreamingLLM (arXiv 2309.17453).

    `s_j = position_j - next_position`: strictly ascending along the sequence, so the best K - num_sinks of what is left
    after the protected sinks are the most recent tokens, at every event, without ties and without 0/1 guards (with
    those, a top-k that returns score order loses the sinks at its second event). The sinks belong to the allocator.

    Keys keep their original positions. The paper's re-numbering inside the cache is a matter of storage, not of scores.
    """

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """Minus the age in tokens, exact for ages below 2^24."""
        age = view.next_position[:, None, None] - view.positions
        return -(age.masked_fill(~view.valid, 0).float())
