"""The contract of a scorer: which tokens matter."""

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float32
from torch import Tensor

from kvstitch.views import LayerView, Needs, Rotary


class Scorer(ABC):
    """Scores every stored slot of a layer; higher = keep.

    A scorer is a frozen dataclass without state of its own: whatever must live as long as a request lives in the cache
    and arrives in the view. Scores are raw: the selector protects sinks and recent tokens, so a scorer never writes
    guards for them.
    """

    @property
    def needs(self) -> Needs:
        """What the view must contain; read once, when the press is built."""
        return Needs()

    def waits(self, view: LayerView) -> Bool[Tensor, "B"] | None:  # noqa: B027 (most never do)
        """Rows about which too little is known for their scores to mean anything; None if that never happens.

        A compaction passes them over, and they wait for the next one; their neighbours in the batch do not. Asked once
        an event, with the first layer.
        """

    def check_model(  # noqa: B027 (most serve any)
        self, rotary: Rotary, num_layers: int, num_query_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Raise `ValueError` if this scorer cannot serve the model; asked once, before anything runs."""

    @abstractmethod
    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """Float32 whatever the model's dtype, finite on valid slots; what stands on empty slots is ignored."""
