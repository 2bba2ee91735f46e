"""Bytes and peaks are measured, and the regions of an index are told token by token."""

import os

import numpy as np
import pytest
import torch

from kvstitch.allocators import CommunityRetrieval
from kvstitch.evaluation.compactions import region_arrays
from kvstitch.evaluation.environment import peak_memory, reset_peak_memory
from kvstitch.evaluation.streams import Stream, auxiliary_bytes
from kvstitch.presses import RetrievalPress


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a /proc/self/clear_refs (Linux) that may be written"
)
def test_a_peak_is_forgotten_and_seen_again():
    reset_peak_memory()
    before = peak_memory()["peak_process_bytes"]
    block = torch.ones(2**26, dtype=torch.uint8)
    during = peak_memory()["peak_process_bytes"]
    assert during >= before + 2**25
    del block
    reset_peak_memory()
    assert peak_memory()["peak_process_bytes"] < during


def test_mean_bytes_are_those_of_one_token_after_the_other(tiny, make_press):
    tokens = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    slot = 2 * 3 * 2 * 16 * 4
    for size in (1, 20):
        dense = Stream(tiny.model)
        dense.prefill(tokens[:20])
        for start in range(20, 60, size):
            dense.feed(tokens[start : start + size])
        assert dense.storage.mean_bytes == pytest.approx(slot * (20 + 41 / 2))
    # A press has room for an interval from its first token on, so chunks of an interval tell the same.
    means = []
    for size in (1, 20):
        with make_press(budget=10, interval=20)(tiny.model) as run:
            pressed = Stream(tiny.model)
            pressed.prefill(tokens[:20])
            run.end_prefill()
            for start in range(20, 60, size):
                pressed.feed(tokens[start : start + size])
            means.append(pressed.storage.mean_bytes)
            assert run.num_events == 1
    assert means[0] == pytest.approx(means[1]) and means[0] < pressed.storage.peak_bytes


def test_auxiliary_bytes_are_those_beside_keys_and_values(tiny, make_press):
    dense = Stream(tiny.model)
    dense.prefill([5] * 30)
    assert auxiliary_bytes(dense.cache) == 0
    with make_press()(tiny.model) as run:
        pressed = Stream(tiny.model)
        pressed.prefill([5] * 30)
        positions = sum(layer.stored_positions.untyped_storage().nbytes() for layer in run.layers.values())
        held = auxiliary_bytes(pressed.cache)
        assert positions <= held < positions + 4096
        # A look changes nothing, and nothing is counted twice.
        assert auxiliary_bytes(pressed.cache) == held
        layer = next(iter(run.layers.values()))
        layer.slot_state["credit"] = torch.zeros(1, 2, 30)
        layer.slot_state["same"] = layer.slot_state["credit"]
        assert auxiliary_bytes(pressed.cache) == held + 240


def test_regions_of_an_index_cover_what_is_neither_sink_nor_recent(tiny):
    press = RetrievalPress(CommunityRetrieval(), budget=40, num_sinks=4, num_recent=8)
    with press(tiny.model) as run:
        stream = Stream(tiny.model)
        stream.prefill(torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(0)).tolist())
        assert region_arrays(run, "a") == {}
        stream.feed([5])
        arrays = region_arrays(run, "a")
        sizes = run.events[0].layers[0].details["sizes"][0]
    assert str(arrays["sample"]) == "a" and {f"labels_{layer}" for layer in range(3)} < set(arrays)
    labels = arrays["labels_0"]
    assert labels.shape == (2, 121) and (labels[:, :4] == -1).all() and (labels[:, -8:] == -1).all()
    for head in range(2):
        assert (np.bincount(labels[head][labels[head] >= 0], minlength=sizes.shape[1]) == sizes[head].numpy()).all()
    assert np.isfinite(arrays["modularity_0"])
