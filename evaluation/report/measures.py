"""The metrics that a report shows, and which way is better."""

from collections.abc import Iterable

from kvstitch.evaluation.metric_titles import Metric, known

# Methods are ranked by these; each has a table and a chart.
QUALITY = known("accuracy", "pass_at_k", "kl", "top1_agreement", "nll", "nll_difference", "perplexity", "mass_recall")
_LESS_IS_BETTER = frozenset({"kl", "nll", "nll_difference", "perplexity"})
# Means over tokens, which an evicting and a retrieving press, or other intervals, do not share: they compare only over the same.
OVER_TOKENS = frozenset(
    {"kl", "top1_agreement", "nll", "nll_difference", "perplexity", "mass_recall", "mass_recall_worst"}
)
# These stand in tables of their own, unranked.
CACHE = known(
    "mass_recall_worst",
    "wiped_regions",
    "retained_iou",
    "read_slots",
    "read_bytes",
    "index_share",
    "communities",
    "modularity",
    "resolution",
    "graph_tokens",
)
TEXT = known("answer_tokens", "truncated", "repetition", "seconds")
MEMORY = known(
    "mean_slots",
    "peak_slots",
    "mean_kv_bytes",
    "kv_bytes",
    "mean_kept_bytes",
    "mean_unfreed_bytes",
    "mean_freed_bytes",
    "auxiliary_bytes",
    "peak_process_bytes",
    "peak_device_bytes",
)
SPEED = known("prefill_seconds", "decode_tokens_per_second")
TIME = known(
    "events",
    "event_seconds",
    "event_time_share",
    "observe_seconds",
    "index_seconds",
    "exposed_seconds",
    "background_seconds",
)


def best_mean(metric: Metric, means: Iterable[float]) -> float:
    """The best of some means of a metric of quality."""
    return min(means) if metric.name in _LESS_IS_BETTER else max(means)
