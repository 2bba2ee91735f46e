"""What the metrics of `metrics.json` are called, how they are written, and which of them the dense model has, too."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Metric:
    """A metric as readers see it.

    Args:
        name: in `metrics.json`.
        title: for readers, short enough for the head of a column.
        write: how a number is written.
        has_dense: whether the dense model has the same, under `dense_` and this name.
    """

    name: str
    title: str
    write: Callable[[float], str]
    has_dense: bool

    @property
    def dense(self) -> str | None:
        """Name of the dense model's counterpart; None without one."""
        return f"dense_{self.name}" if self.has_dense else None

    @property
    def percent(self) -> bool:
        """Whether it is a share."""
        return self.write is write_percent


def write_percent(share: float) -> str:
    """`55.0 %`."""
    return f"{fixed(100 * share, 1)} %"


def write_bytes(value: float) -> str:
    """`3.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """With so many decimals; what rounds to nothing has no minus. `sign`: "+" to write that of other numbers, too."""
    return f"{value if round(value, decimals) else 0.0:{sign}.{decimals}f}"


def _decimals(count: int, sign: str = "") -> Callable[[float], str]:
    return partial(fixed, decimals=count, sign=sign)


_BOTH_SIDES = (
    ("accuracy", "answers right", write_percent),
    ("pass_at_k", "right in one of the draws", write_percent),
    ("answer_tokens", "answer tokens", _decimals(1)),
    ("truncated", "answers cut short", write_percent),
    ("repetition", "repeated 4-grams", write_percent),
    ("seconds", "seconds an answer", _decimals(2)),
    ("nll", "NLL, nats a token", _decimals(4)),
    ("perplexity", "perplexity", _decimals(2)),
    ("mean_slots", "slots a kv head, mean", _decimals(0)),
    ("peak_slots", "slots a kv head, peak", _decimals(0)),
    ("mean_kv_bytes", "KV storage, mean", write_bytes),
    ("kv_bytes", "KV storage, peak", write_bytes),
    ("peak_process_bytes", "process, peak", write_bytes),
    ("peak_device_bytes", "GPU memory, peak", write_bytes),
    ("read_bytes", "bytes read a step, index included", write_bytes),
    ("prefill_seconds", "prefill, s", _decimals(2)),
    ("decode_tokens_per_second", "decoded tokens/s", _decimals(1)),
)
_PRESSED_ONLY = (
    ("nll_difference", "NLL difference", _decimals(4, "+")),
    ("kl", "KL(dense || pressed), nats", _decimals(4)),
    ("top1_agreement", "top-1 agreement", write_percent),
    ("wiped_regions", "regions wiped out", write_percent),
    ("retained_iou", "kept again (IoU)", write_percent),
    ("mean_kept_bytes", "KV attended to, mean", write_bytes),
    ("kept_bytes", "KV attended to, peak", write_bytes),
    ("mean_unfreed_bytes", "evicted but stored, mean", write_bytes),
    ("mean_freed_bytes", "evicted and freed, mean", write_bytes),
    ("auxiliary_bytes", "held beside it, peak", write_bytes),
    ("read_slots", "slots read, kv head and step", _decimals(0)),
    ("mass_recall", "attention mass recall", write_percent),
    ("mass_recall_worst", "recall, worst tenth of heads", write_percent),
    ("communities", "communities", _decimals(0)),
    ("modularity", "modularity", _decimals(3)),
    ("resolution", "γ", "{:.3g}".format),
    ("graph_tokens", "tokens in a graph", _decimals(0)),
    ("index_share", "index, share of K and V", write_percent),
    ("observe_seconds", "seconds for edges", _decimals(2)),
    ("background_seconds", "seconds in the background", _decimals(2)),
    ("index_seconds", "seconds for indices", _decimals(2)),
    ("exposed_seconds", "… waiting for the background", _decimals(2)),
    ("events", "events a sample", _decimals(1)),
    ("event_seconds", "seconds an event", _decimals(3)),
    ("event_time_share", "time in events", write_percent),
)
# Peaks of all that runs: of the pressed model alone only where the dense one's was measured apart from it.
SHARED_PEAKS = frozenset({"peak_process_bytes", "peak_device_bytes"})
KNOWN_METRICS = {
    name: Metric(name, title, write, has_dense)
    for metrics, has_dense in ((_BOTH_SIDES, True), (_PRESSED_ONLY, False))
    for name, title, write in metrics
}


def known(*names: str) -> tuple[Metric, ...]:
    """Metrics by their names, in this order."""
    return tuple(KNOWN_METRICS[name] for name in names)
