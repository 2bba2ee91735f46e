"""How many slots to keep or to read, and where."""

from kvstitch.allocators.base import EvictingAllocator, Selection

__all__ = ["EvictingAllocator", "Selection"]
