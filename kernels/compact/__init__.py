"""Moving kept slots to the front of a cache, in place."""

from kvstitch.kernels.compact.api import compact

__all__ = ["compact"]
