"""Figures of a run folder, redrawn from its files alone. matplotlib is an extra: `pip install -e '.[plots]'`."""

import importlib.util
from pathlib import Path

import numpy as np

from kvstitch.evaluation.records import KEPT_POSITIONS

__all__ = ["KEPT_POSITIONS", "can_plot", "plot_kept_positions"]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_kept_positions(source: Path, target: Path, layer: int | None = None) -> int:
    """Draw which positions one layer kept at each compaction, a panel for each kv head (at most eight).

    Args:
        source: written by `kvstitch.evaluation.compactions.save_kept_positions`.
        target: PNG to write.
        layer: decoder layer; `None`: the middle one of those in the file.

    Returns:
        The layer drawn.

    Raises:
        ValueError: the file does not hold that layer.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    with np.load(source) as arrays:
        layers = sorted(int(name.removeprefix("layer_")) for name in arrays.files if name.startswith("layer_"))
        layer = layers[len(layers) // 2] if layer is None else layer
        if layer not in layers:
            raise ValueError(f"{source} holds layers {layers}, not {layer}")
        kept, seen, sample = arrays[f"layer_{layer}"], arrays["seen_tokens"], str(arrays["sample"])
    heads = min(kept.shape[1], 8)
    figure = Figure(figsize=(3.2 * heads + 0.8, 4.2), layout="constrained")
    panels = figure.subplots(1, heads, sharey=True, squeeze=False)[0]
    for head, panel in enumerate(panels):
        for event, tokens in enumerate(seen):
            positions = kept[event, head]
            positions = positions[positions >= 0]
            panel.plot(np.full(positions.shape, tokens), positions, "_", color="#0072B2", markersize=9, alpha=0.5)
        # Above this line a token has not come yet.
        panel.plot([0, seen[-1]], [0, seen[-1]], color="0.6", linewidth=0.8)
        panel.set_title(f"kv head {head}")
        panel.set_xlabel("tokens seen at the event")
    panels[0].set_ylabel("position in the original sequence")
    figure.suptitle(f"Kept positions, layer {layer}, sample {sample}")
    scratch = target.with_name(f".{target.name}")
    figure.savefig(scratch, dpi=120, format="png")
    scratch.replace(target)
    return layer
