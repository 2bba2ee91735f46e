"""Scorers: which tokens matter."""

from kvstitch.scorers.base import Scorer
from kvstitch.scorers.expected_attention import ExpectedAttention
from kvstitch.scorers.key_diff import KeyDiff
from kvstitch.scorers.key_norm import KeyNorm
from kvstitch.scorers.kvpress_scorer import KVPressScorer
from kvstitch.scorers.random import Random
from kvstitch.scorers.rkv import RKV
from kvstitch.scorers.snap_kv import SnapKV
from kvstitch.scorers.streaming_llm import StreamingLLM
from kvstitch.scorers.tova import TOVA
from kvstitch.scorers.tri_attention import TriAttention
from kvstitch.scorers.tri_attention_statistics import TriAttentionStatistics

__all__ = [
    "TOVA",
    "ExpectedAttention",
    "KVPressScorer",
    "KeyDiff",
    "KeyNorm",
    "RKV",
    "Random",
    "Scorer",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "TriAttentionStatistics",
]
