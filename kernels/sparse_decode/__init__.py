"""Exact attention of one query token over chosen slots of the cache."""

from kvstitch.kernels.sparse_decode.api import SparseDecode, expand_ranges, sparse_decode

__all__ = ["SparseDecode", "expand_ranges", "sparse_decode"]
