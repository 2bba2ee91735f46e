"""Which tokens matter: every scorer maps a `LayerView` to scores `[B, H, T]`, higher = keep."""

from kvstitch.scorers.base import Scorer

__all__ = ["Scorer"]
