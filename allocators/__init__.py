"""How many slots to keep or to read, and where."""

from kvstitch.allocators.base import EvictingAllocator, Selection
from kvstitch.allocators.community_quota import CommunityQuota
from kvstitch.allocators.fixed_segments import FixedSegments
from kvstitch.allocators.global_topk import GlobalTopK
from kvstitch.allocators.head_adaptive import HeadAdaptive
from kvstitch.allocators.mass_segments import SegmentSelection
from kvstitch.allocators.pyramid import Pyramid
from kvstitch.allocators.retrieval import (
    ClusterRetrieval,
    CommunityRetrieval,
    GraphEviction,
    OracleRetrieval,
    PageRetrieval,
    RetrievingAllocator,
    WindowRetrieval,
)
from kvstitch.allocators.segment_quota import SegmentQuota
from kvstitch.allocators.selector import Partition, protected, select, slots_of

__all__ = [
    "ClusterRetrieval",
    "CommunityQuota",
    "CommunityRetrieval",
    "EvictingAllocator",
    "FixedSegments",
    "GlobalTopK",
    "GraphEviction",
    "HeadAdaptive",
    "OracleRetrieval",
    "PageRetrieval",
    "Partition",
    "Pyramid",
    "RetrievingAllocator",
    "SegmentQuota",
    "SegmentSelection",
    "Selection",
    "WindowRetrieval",
    "protected",
    "select",
    "slots_of",
]
