"""What `scripts/bench.py` measures: medians of repeats that are interleaved, so that a busy moment hits all alike."""
