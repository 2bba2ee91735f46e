"""How many slots to keep or to read, and where."""

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.fixed_segments import FixedSegments
from kvstitch.allocators.global_topk import GlobalTopK
from kvstitch.allocators.head_adaptive import HeadAdaptive
from kvstitch.allocators.mass_segments import SegmentSelection
from kvstitch.allocators.pyramid import Pyramid
from kvstitch.allocators.segment_quota import SegmentQuota
from kvstitch.allocators.selector import Partition, protected, select, slots_of

__all__ = [
    "EvictingAllocator",
    "FixedSegments",
    "GlobalTopK",
    "HeadAdaptive",
    "Partition",
    "Pyramid",
    "SegmentQuota",
    "SegmentSelection",
    "Selection",
    "protected",
    "select",
    "slots_of",
]
