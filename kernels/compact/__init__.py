"""Moving kept slots to the front of a cache, or into a smaller one."""

from kvstitch.kernels.compact.api import compact

__all__ = ["compact"]
