"""When and how the cache obeys: the only code that knows transformers."""

from kvstitch.presses.budget import Budget
from kvstitch.presses.events import CompactionEvent, LayerEvent
from kvstitch.presses.eviction import EvictionPress, EvictionRun
from kvstitch.presses.retrieval import RetrievalPress
from kvstitch.presses.retrieval_events import IndexEvent, ReadEvent
from kvstitch.presses.retrieval_run import RetrievalRun
from kvstitch.presses.rotary import UnsupportedModel

__all__ = [
    "Budget",
    "CompactionEvent",
    "EvictionPress",
    "EvictionRun",
    "IndexEvent",
    "LayerEvent",
    "ReadEvent",
    "RetrievalPress",
    "RetrievalRun",
    "UnsupportedModel",
]
