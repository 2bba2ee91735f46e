"""What was read, added up."""

import torch

from kvstitch.evaluation.reads import METRICS, ReadMeter, distinct_slots
from kvstitch.presses.retrieval_events import ReadEvent


class Layer:
    def __init__(self, length, dim=4, heads=2):
        self.keys = self.values = torch.zeros(1, heads, length, dim)


class FakeCache:
    def __init__(self, *lengths):
        self.layers = [Layer(length) for length in lengths]


def event(layer, positions, index_rows=0, index_bytes=0, key_rows=0, mass=None):
    return ReadEvent(layer, 9, 2, torch.tensor([positions]), index_rows, index_bytes, key_rows, mass)


def test_positions_that_heads_share_count_once():
    positions = torch.tensor([[[3, 5, -1], [5, 7, 3], [1, 1, -1], [-1, -1, 2]]])
    assert distinct_slots(positions, 2).tolist() == [[3, 2]]
    assert distinct_slots(positions, 4).tolist() == [[2, 3, 1, 1]]


def test_sums_by_hand():
    """Two layers, two steps in the first: slots 2 and 3 a head, keys as numbers and as tensors."""
    seen = []
    meter = ReadMeter(seen.append)
    meter(event(0, [[0, 1], [2, 3]], index_rows=10, index_bytes=70, key_rows=4))
    meter(event(0, [[0, 1, 2], [2, 3, 4]], index_rows=10, index_bytes=90, key_rows=torch.tensor([[2, 6]])))
    meter(event(1, [[0], [2]], index_rows=0, key_rows=0))
    metrics = meter.metrics(FakeCache(100, 50))
    assert len(seen) == 3 and set(metrics) == set(METRICS)
    assert metrics["read_slots"] == (2.5 + 1) / 2 and metrics["read_keys"] == 2 and metrics["read_index_rows"] == 5
    row = 2 * 4 * 4
    first, second = 2.5 * 2 * row + 4 * row + 80 * 2, 1 * 2 * row
    assert metrics["read_bytes"] == first + second
    assert metrics["dense_read_bytes"] == 2 * row * 150
    assert metrics["mass_recall"] is None


def test_recall_and_its_worst_heads():
    meter = ReadMeter()
    for layer in range(5):
        meter(event(layer, [[0], [1]], mass=torch.tensor([[0.9, 0.5 + layer / 10]])))
    metrics = meter.metrics(FakeCache(*[9] * 5))
    assert abs(metrics["mass_recall"] - 0.8) < 1e-6 and abs(metrics["mass_recall_worst"] - 0.5) < 1e-6


def test_nothing_read():
    assert ReadMeter().metrics(FakeCache(3)) == dict.fromkeys(METRICS)
