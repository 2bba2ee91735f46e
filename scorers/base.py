"""The contract of a scorer: which tokens matter."""

from abc import ABC, abstractmethod

from jaxtyping import Float32
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

    @property
    def least_tokens(self) -> int:
        """Tokens that a row must have seen before its scores mean anything; a compaction that is due earlier waits."""
        return 0

    def check_model(self, rotary: Rotary, num_layers: int, num_query_heads: int, num_kv_heads: int) -> None:  # noqa: B027 (most serve any)
        """Raise `ValueError` if this scorer cannot serve the model; asked once, before anything runs."""

    @abstractmethod
    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """Float32 whatever the model's dtype, finite on valid slots; what stands on empty slots is ignored."""
