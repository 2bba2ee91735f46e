"""What the compactions of one sample come to, and the file from which kept positions are drawn."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvstitch.evaluation.metrics import retained_iou, wiped_regions
from kvstitch.evaluation.records import whole_file
from kvstitch.presses import CompactionEvent, RetrievalRun


def event_metrics(events: Sequence[CompactionEvent], num_layers: int) -> dict[str, float | None]:
    """Wipe-out, stability and cost of the compactions along one sequence.

    Args:
        events: in order.
        num_layers: layers that the press compresses.

    Returns:
        `events`; `wiped_regions` after the last of them and `retained_iou` between neighbours, both means over layers, rows
        and kv heads; `event_seconds`, the mean of one. Where the allocator cuts graphs also `modularity`, `resolution` and
        `graph_tokens`, means over events, layers, rows and kv heads.
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
    } | _graph_metrics(events)


def _graph_metrics(events: Sequence[CompactionEvent]) -> dict[str, float]:
    cut = [layer for event in events for layer in event.layers if "modularity" in layer.details]
    if not cut:
        return {}
    means = {
        name: statistics.fmean(layer.details[name].mean().item() for layer in cut)
        for name in ("modularity", "resolution")
    }
    return means | {"graph_tokens": statistics.fmean(layer.slots_before for layer in cut)}


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
    """Write what every layer kept at every event, row 0 of the batch, as compressed NumPy arrays.

    Keys: `sample`; `seen_tokens` `[E]`; `layer_<index>` int32 `[E, H, K]`, positions, -1 where a head kept fewer or the layer
    was not compacted at that event. Where the allocator cuts segments also `boundaries_<index>` int32 `[E, H, R + 1]`,
    `quotas_<index>` int32 and `masses_<index>` float32 `[E, H, R]`, -1 where there is no such segment.
    """
    indices = sorted({layer.layer_idx for event in events for layer in event.layers})
    arrays = {"sample": np.array(sample_id), "seen_tokens": np.array([event.seen_tokens for event in events])}
    for index in indices:
        here = [next((layer for layer in event.layers if layer.layer_idx == index), None) for event in events]
        arrays[f"layer_{index}"] = _stacked([None if layer is None else layer.positions for layer in here], np.int32)
        for name, kind in (("boundaries", np.int32), ("quotas", np.int32), ("masses", np.float32)):
            if all(layer is None or {"boundaries", "quotas", "masses"} <= set(layer.details) for layer in here):
                details = [None if layer is None else layer.details[name] for layer in here]
                arrays[f"{name}_{index}"] = _stacked(details, kind)
    save_arrays(path, arrays)


def region_arrays(run: RetrievalRun, sample_id: str) -> dict[str, np.ndarray]:
    """Which region each token belongs to, for `save_arrays`; row 0 of the batch, at the last time the index was built.

    Only of indices with one list of regions a kv head, whose members lie one region after another in the storage.

    Returns:
        `sample`; `labels_<layer>` int32 `[H, S]`, the region of each position, -1 for none; `modularity_<layer>` and
        `resolution_<layer>`, where there is a graph. Empty without regions.
    """
    arrays: dict[str, np.ndarray] = {}
    newest = {layer.layer_idx: layer for event in run.events for layer in event.layers}
    for index, layer in newest.items():
        positions = run.positions(index)[0]
        sizes = layer.details.get("sizes")
        if sizes is None or sizes.shape[1] != positions.shape[0]:
            continue
        arrays[f"labels_{index}"] = _labels(positions, sizes[0], run.press.num_sinks)
        for name in ("modularity", "resolution"):
            if name in layer.details:
                arrays[f"{name}_{index}"] = layer.details[name].double().nanmean().cpu().numpy()
    return {"sample": np.array(sample_id)} | arrays if arrays else {}


def _labels(positions: Tensor, sizes: Tensor, num_sinks: int) -> np.ndarray:
    """Regions begin behind the sinks, which come behind empty slots."""
    heads, length = positions.shape
    labels = np.full((heads, int(positions.max()) + 1), -1, dtype=np.int32)
    for head in range(heads):
        regions = torch.repeat_interleave(torch.arange(sizes.shape[1], device=sizes.device), sizes[head])
        first = int((positions[head] < 0).sum()) + num_sinks
        members = positions[head, first : first + len(regions)]
        labels[head, members.cpu().numpy()] = regions[: len(members)].cpu().numpy()
    return labels


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write compressed NumPy arrays that appear whole or not at all.

    Raises:
        RunError: the disk is full or read-only; what stood there is kept.
    """
    with whole_file(path) as file:
        np.savez_compressed(file, **arrays)


def _stacked(rows: Sequence[Tensor | None], kind: type) -> np.ndarray:
    """Row 0 of `[B, H, K]` of each event, padded with -1 to the widest."""
    each = [None if row is None else row[0].cpu().numpy() for row in rows]
    present = [row for row in each if row is not None]
    stacked = np.full((len(rows), present[0].shape[0], max(row.shape[1] for row in present)), -1, dtype=kind)
    for target, row in zip(stacked, each):
        if row is not None:
            target[:, : row.shape[1]] = row
    return stacked
