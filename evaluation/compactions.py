"""What the compactions of one sample come to, and the file from which kept positions are drawn."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvstitch.evaluation.metrics import retained_iou, wiped_regions
from kvstitch.presses import CompactionEvent


def event_metrics(events: Sequence[CompactionEvent], num_layers: int) -> dict[str, float | None]:
    """Wipe-out, stability and cost of the compactions along one sequence.

    Args:
        events: in order.
        num_layers: layers that the press compresses.

    Returns:
        `events`; `wiped_regions` after the last of them and `retained_iou` between neighbours, both means over layers, rows
        and kv heads; `event_seconds`, the mean of one.
    """
    ious = [
        retained_iou(before, after, event.seen_tokens).mean().item()
        for previous, event in zip(events, events[1:])
        for before, after in _kept_by_both(previous, event)
    ]
    seconds = sum(event.seconds for event in events)
    return {
        "events": len(events),
        "wiped_regions": _wiped_after(events, num_layers),
        "retained_iou": statistics.fmean(ious) if ious else None,
        "event_seconds": seconds / len(events) if events else None,
    }


def _wiped_after(events: Sequence[CompactionEvent], num_layers: int) -> float:
    if not events:
        return 0.0
    seen_tokens = events[-1].seen_tokens
    # A layer that stayed within its budget at the last event lost nothing there since its own last one.
    newest = {layer.layer_idx: (layer.positions, event.seen_tokens) for event in events for layer in event.layers}
    wiped = 0.0
    for positions, cut in newest.values():
        since = torch.arange(cut, seen_tokens, device=positions.device).expand(*positions.shape[:2], -1)
        wiped += wiped_regions(torch.cat((positions, since), dim=2), seen_tokens).mean().item()
    return wiped / num_layers


def _kept_by_both(previous: CompactionEvent, event: CompactionEvent) -> list[tuple[Tensor, Tensor]]:
    before = {layer.layer_idx: layer.positions for layer in previous.layers}
    return [(before[layer.layer_idx], layer.positions) for layer in event.layers if layer.layer_idx in before]


def save_kept_positions(path: Path, sample_id: str, events: Sequence[CompactionEvent]) -> None:
    """Write the positions that every layer kept at every event, row 0 of the batch, as compressed NumPy arrays.

    Keys: `sample`; `seen_tokens` `[E]`; `layer_<index>` int32 `[E, H, K]`, -1 where a head kept fewer or the layer was not
    compacted at that event.
    """
    indices = sorted({layer.layer_idx for event in events for layer in event.layers})
    arrays = {f"layer_{index}": _stacked(events, index) for index in indices}
    scratch = path.with_name(f".{path.name}")
    with scratch.open("wb") as file:
        np.savez_compressed(
            file, sample=np.array(sample_id), seen_tokens=np.array([event.seen_tokens for event in events]), **arrays
        )
    scratch.replace(path)


def _stacked(events: Sequence[CompactionEvent], index: int) -> np.ndarray:
    kept = [
        next((layer.positions[0].cpu().numpy() for layer in event.layers if layer.layer_idx == index), None)
        for event in events
    ]
    present = [positions for positions in kept if positions is not None]
    stacked = np.full((len(events), present[0].shape[0], max(p.shape[1] for p in present)), -1, dtype=np.int32)
    for row, positions in zip(stacked, kept):
        if positions is not None:
            row[:, : positions.shape[1]] = positions
    return stacked
