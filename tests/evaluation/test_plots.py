"""Kept positions go to a file and from there, alone, to a picture."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvstitch.evaluation.compactions import event_metrics, save_kept_positions
from kvstitch.evaluation.plots import can_plot, plot_kept_positions
from kvstitch.presses import CompactionEvent, LayerEvent


def layer_event(index, positions):
    kept = torch.tensor([positions])
    return LayerEvent(index, 9, kept.shape[2], kept, kept, {}, 0.5)


EVENTS = [
    CompactionEvent(0, 130, "interval", (layer_event(1, [[0, 5], [1, 100]]), layer_event(2, [[0, 129], [7, -1]]))),
    CompactionEvent(1, 260, "interval", (layer_event(1, [[0, 100, 200], [1, 5, 259]]),)),
]


def test_the_file_holds_every_layer_and_event(tmp_path):
    save_kept_positions(tmp_path / "kept.npz", "sample-1", EVENTS)
    with np.load(tmp_path / "kept.npz") as arrays:
        assert str(arrays["sample"]) == "sample-1" and arrays["seen_tokens"].tolist() == [130, 260]
        assert arrays["layer_1"].tolist() == [[[0, 5, -1], [1, 100, -1]], [[0, 100, 200], [1, 5, 259]]]
        # A layer that was within its budget at an event shows nothing there.
        assert arrays["layer_2"].tolist() == [[[0, 129], [7, -1]], [[-1, -1], [-1, -1]]]


def test_segments_and_quotas_are_kept_too(tmp_path):
    details = {
        "boundaries": torch.tensor([[[0, 3, 9, -1], [0, 9, -1, -1]]]),
        "quotas": torch.tensor([[[1, 1, -1], [2, -1, -1]]]),
        "masses": torch.tensor([[[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]]),
    }
    kept = torch.tensor([[[0, 5], [1, 100]]])
    events = [CompactionEvent(0, 130, "interval", (LayerEvent(1, 9, 2, kept, kept, details, 0.5),)), EVENTS[0]]
    save_kept_positions(tmp_path / "kept.npz", "sample-1", events[:1])
    with np.load(tmp_path / "kept.npz") as arrays:
        for name, tensor in details.items():
            assert (arrays[f"{name}_1"] == tensor.numpy()).all(), name
    # Not where an event lacks them.
    save_kept_positions(tmp_path / "mixed.npz", "sample-1", events)
    with np.load(tmp_path / "mixed.npz") as arrays:
        assert not any(name.startswith(("boundaries", "quotas", "masses")) for name in arrays)


def test_event_metrics_of_layers_that_part_ways():
    metrics = event_metrics(EVENTS, num_layers=3)
    # Five regions of 64 tokens at 260. Layer 1: heads keep {0, 1, 3} and {0, 4} of them. Layer 2 lost nothing after 130:
    # heads keep {0, 2, 3, 4}. Layer 0 was never compacted.
    layer_1 = (2 / 5 + 3 / 5) / 2
    layer_2 = 1 / 5
    assert metrics["wiped_regions"] == pytest.approx((layer_1 + layer_2) / 3)
    # Layer 1 alone was compacted twice: {0, 5} then {0, 100, 200}, {1, 100} then {1, 5, 259}.
    assert metrics["retained_iou"] == pytest.approx(1 / 4)
    assert metrics["events"] == 2 and metrics["event_seconds"] == pytest.approx(0.75)


def test_graphs_that_an_allocator_cut_are_told():
    kept = torch.tensor([[[0, 5], [1, 100]]])
    parts = [
        LayerEvent(
            index, 90 + index, 2, kept, kept, {"modularity": torch.tensor([pair]), "resolution": torch.ones(1, 2)}, 0.5
        )
        for index, pair in enumerate(([0.2, 0.4], [0.6, 0.8]))
    ]
    metrics = event_metrics([CompactionEvent(0, 130, "interval", tuple(parts))], num_layers=2)
    assert (
        metrics["modularity"] == pytest.approx(0.5) and metrics["resolution"] == 1 and metrics["graph_tokens"] == 90.5
    )
    assert "modularity" not in event_metrics(EVENTS, num_layers=3)


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_the_picture_is_drawn_from_the_file(tmp_path):
    save_kept_positions(tmp_path / "kept.npz", "sample-1", EVENTS)
    assert plot_kept_positions(tmp_path / "kept.npz", tmp_path / "kept.png") == 2
    assert plot_kept_positions(tmp_path / "kept.npz", tmp_path / "kept1.png", layer=1) == 1
    pictures = [(tmp_path / name).read_bytes() for name in ("kept.png", "kept1.png")]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in pictures)
    assert pictures[0] != pictures[1]
    with pytest.raises(ValueError, match=r"holds layers \[1, 2\], not 5"):
        plot_kept_positions(tmp_path / "kept.npz", tmp_path / "other.png", layer=5)


def test_nothing_imports_matplotlib_before_a_picture_is_drawn():
    code = "import sys, kvstitch.evaluation.plots, kvstitch.evaluation.runner; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
