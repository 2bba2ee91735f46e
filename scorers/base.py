"""The contract of a scorer: which tokens matter."""

from abc import ABC, abstractmethod

from jaxtyping import Float32
from torch import Tensor

from kvstitch.views import LayerView, Needs


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

    @abstractmethod
    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """Float32 whatever the model's dtype, finite on valid slots; what stands on empty slots is ignored."""
