"""Retrieval: every key is kept, a part is read."""

from kvstitch.allocators.retrieval.base import (
    DecodeStep,
    LayerFrame,
    LayerIndex,
    ReadPlan,
    Reads,
    Rest,
    RetrievingAllocator,
)
from kvstitch.allocators.retrieval.clusters import ClusterRetrieval
from kvstitch.allocators.retrieval.community import CommunityRetrieval
from kvstitch.allocators.retrieval.pages import PageRetrieval
from kvstitch.allocators.retrieval.plain import OracleRetrieval, WindowRetrieval
from kvstitch.allocators.retrieval.static import GraphEviction

__all__ = [
    "ClusterRetrieval",
    "CommunityRetrieval",
    "DecodeStep",
    "GraphEviction",
    "LayerFrame",
    "LayerIndex",
    "OracleRetrieval",
    "PageRetrieval",
    "ReadPlan",
    "Reads",
    "Rest",
    "RetrievingAllocator",
    "WindowRetrieval",
]
