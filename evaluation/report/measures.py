"""The metrics that a report shows: what they are called, which way is better, how they are written."""

from collections.abc import Callable
from dataclasses import dataclass

from kvstitch.evaluation.table import write_bytes


@dataclass(frozen=True)
class Measure:
    """A metric that methods are ranked by.

    Args:
        metric: its name in `metrics.json`.
        title: for readers.
        higher: whether more is better.
        percent: whether it is a share.
    """

    metric: str
    title: str
    higher: bool
    percent: bool = False

    def write(self, number: float) -> str:
        """As readers see it."""
        return percent(number) if self.percent else f"{number:.4f}"


@dataclass(frozen=True)
class Column:
    """A metric that stands in a table of its own, unranked.

    Args:
        title: for readers.
        metric: of the pressed model.
        dense: of the dense model; None if it has no such thing.
        write: how a number is written.
    """

    title: str
    metric: str
    dense: str | None
    write: Callable[[float], str]


def percent(share: float) -> str:
    """`55.0 %`."""
    return f"{100 * share:.1f} %"


QUALITY = (
    Measure("accuracy", "answers right", higher=True, percent=True),
    Measure("pass_at_k", "right in one of the draws", higher=True, percent=True),
    Measure("kl", "KL(dense || pressed), nats", higher=False),
    Measure("top1_agreement", "top-1 agreement", higher=True, percent=True),
    Measure("nll", "NLL, nats a token", higher=False),
    Measure("mass_recall", "attention mass recall", higher=True, percent=True),
)
CACHE = (
    Column("recall, worst tenth of heads", "mass_recall_worst", None, percent),
    Column("regions wiped out", "wiped_regions", None, percent),
    Column("kept again (IoU)", "retained_iou", None, percent),
    Column("slots read", "read_slots", None, "{:.0f}".format),
    Column("read a step", "read_bytes", "dense_read_bytes", write_bytes),
    Column("index, of K and V", "index_share", None, percent),
    Column("communities", "communities", None, "{:.0f}".format),
    Column("modularity", "modularity", None, "{:.3f}".format),
    Column("γ", "resolution", None, "{:.3g}".format),
    Column("tokens in a graph", "graph_tokens", None, "{:.0f}".format),
)
TEXT = (
    Column("answer tokens", "answer_tokens", "dense_answer_tokens", "{:.1f}".format),
    Column("answers cut short", "truncated", "dense_truncated", percent),
    Column("repeated 4-grams", "repetition", "dense_repetition", percent),
    Column("seconds an answer", "seconds", "dense_seconds", "{:.2f}".format),
)
MEMORY = (
    Column("slots, mean", "mean_slots", "dense_mean_slots", "{:.0f}".format),
    Column("slots, peak", "peak_slots", "dense_peak_slots", "{:.0f}".format),
    Column("KV storage, mean", "mean_kv_bytes", "dense_mean_kv_bytes", write_bytes),
    Column("KV storage, peak", "kv_bytes", "dense_kv_bytes", write_bytes),
    Column("held beside it, peak", "auxiliary_bytes", None, write_bytes),
    Column("process, peak", "peak_process_bytes", "dense_peak_process_bytes", write_bytes),
    Column("GPU memory, peak", "peak_device_bytes", "dense_peak_device_bytes", write_bytes),
)
SPEED = (
    Column("prefill, s", "prefill_seconds", "dense_prefill_seconds", "{:.2f}".format),
    Column("decoded tokens/s", "decode_tokens_per_second", "dense_decode_tokens_per_second", "{:.1f}".format),
    Column("events", "events", None, "{:.1f}".format),
    Column("time in events", "event_time_share", None, percent),
)
