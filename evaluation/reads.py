"""What a retrieving press read, added up over steps and layers."""

from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import Cache

from kvstitch.presses import ReadEvent, RetrievalRun

# Heads that matter are often those in which a method is worst.
WORST_SHARE = 0.1
METRICS = (
    "read_slots",
    "read_keys",
    "read_index_rows",
    "read_bytes",
    "dense_read_bytes",
    "mass_recall",
    "mass_recall_worst",
)


class ReadMeter:
    """Called with every `ReadEvent`; keeps sums, not events.

    Args:
        forward: called with the same, or None.
    """

    def __init__(self, forward: Callable[[ReadEvent], None] | None = None):
        self._forward = forward
        self._steps: dict[int, int] = {}
        self._sums: dict[int, dict[str, Tensor]] = {}

    def __call__(self, event: ReadEvent) -> None:
        if self._forward is not None:
            self._forward(event)
        per_head = event.positions.shape[1] // event.num_kv_heads
        new = {
            "slots": distinct_slots(event.positions, event.num_kv_heads).double().mean(),
            "keys": torch.as_tensor(event.key_rows).double().mean() * per_head,
            "index": torch.as_tensor(event.index_rows).double(),
            "index_bytes": torch.as_tensor(event.index_bytes).double(),
        }
        if event.mass is not None:
            new["mass"] = event.mass.double().mean(dim=0)
        old = self._sums.get(event.layer_idx)
        self._sums[event.layer_idx] = new if old is None else {name: old[name] + new[name] for name in new}
        self._steps[event.layer_idx] = self._steps.get(event.layer_idx, 0) + 1

    def metrics(self, cache: Cache) -> dict[str, float | None]:
        """Means over steps, rows, kv heads and layers; None without a step.

        Returns:
            `read_slots`, `read_keys` and `read_index_rows` per kv head and layer; `read_bytes` of a step over all layers
            that retrieve, for one row; `dense_read_bytes`, what reading all keys and values there takes at the end;
            `mass_recall`, and `mass_recall_worst`, its mean over the tenth of heads that have least.
        """
        means = [
            {name: total / self._steps[layer] for name, total in sums.items()} for layer, sums in self._sums.items()
        ]
        metrics = dict.fromkeys(METRICS)
        if not means:
            return metrics
        for name, part in (("read_slots", "slots"), ("read_keys", "keys"), ("read_index_rows", "index")):
            metrics[name] = sum(layer[part].item() for layer in means) / len(means)
        read = dense = 0.0
        for layer, index in zip(means, self._sums):
            keys, values = cache.layers[index].keys, cache.layers[index].values
            key_bytes, value_bytes = (x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values))
            read += layer["slots"] * (key_bytes + value_bytes) + layer["keys"] * key_bytes
            read += layer["index_bytes"] * keys.shape[1]
            dense += keys.shape[2] * (key_bytes + value_bytes)
        metrics |= {"read_bytes": float(read), "dense_read_bytes": float(dense)}
        if all("mass" in layer for layer in means):
            heads = torch.cat([layer["mass"] for layer in means]).sort().values
            metrics["mass_recall"] = heads.mean().item()
            metrics["mass_recall_worst"] = heads[: max(1, round(WORST_SHARE * len(heads)))].mean().item()
        return metrics


def index_metrics(run: RetrievalRun) -> dict[str, float | None]:
    """What the indices took and hold: seconds beside and after the prompt's forward, and bytes against those of the cache.

    Returns:
        `events`, indices built or renewed; `observe_seconds`; `index_seconds` after the prompt, of which `exposed_seconds`
        were waiting for `background_seconds` of work (processor time); `index_bytes` and their `index_share` of the bytes of
        the keys and values in use; `modularity`, `resolution` and `communities`, means over graphs, where there are any, and
        `graph_tokens`, the length of the sequence when they were made.
    """
    events = run.events
    layers = [layer for event in events for layer in event.layers]
    metrics: dict[str, float | None] = {
        "events": len(events),
        "observe_seconds": sum(event.observe_seconds for event in events),
        "index_seconds": sum(event.seconds for event in events),
        "background_seconds": sum(event.busy_seconds for event in events),
        "exposed_seconds": sum(event.exposed_seconds for event in events),
        "index_bytes": run.index_bytes,
        "index_share": run.index_share,
    }
    for name, detail in (("modularity", "modularity"), ("resolution", "resolution"), ("communities", "num_leiden")):
        shown = [layer.details[detail].double() for layer in layers if detail in layer.details]
        metrics[name] = torch.cat(shown).nanmean().item() if shown else None
    with_graph = [event.seen_tokens for event in events if any("modularity" in layer.details for layer in event.layers)]
    metrics["graph_tokens"] = sum(with_graph) / len(with_graph) if with_graph else None
    return metrics


def distinct_slots(positions: Int64[Tensor, "B S M"], num_kv_heads: int) -> Int64[Tensor, "B H"]:
    """Positions that the selections of each kv head read together, each counted once; -1 is none."""
    joined = positions.view(positions.shape[0], num_kv_heads, -1).sort(dim=-1).values
    new = torch.ones_like(joined, dtype=torch.bool)
    new[..., 1:] = joined[..., 1:] != joined[..., :-1]
    return (new & (joined >= 0)).sum(dim=-1)
