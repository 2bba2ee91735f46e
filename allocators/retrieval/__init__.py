"""Retrieval: every key is kept, a part is read."""

from kvstitch.allocators.retrieval.base import DecodeStep, LayerFrame, LayerIndex, ReadPlan, Reads, Rest, RetrievingAllocator
from kvstitch.allocators.retrieval.clusters import ClusterRetrieval
from kvstitch.allocators.retrieval.community import CommunityRetrieval
from kvstitch.allocators.retrieval.pages import PageRetrieval
from kvstitch.allocators.retrieval.plain import OracleRetrieval, WindowRetrieval

__all__ = [
    "ClusterRetrieval",
    "CommunityRetrieval",
    "DecodeStep",
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
