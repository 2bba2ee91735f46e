"""The closing table of a run, drawn from `metrics.json` alone."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstitch.evaluation.metric_titles import SHARED_PEAKS, known
from kvstitch.evaluation.never_bound import never_bound

ROWS = known(
    "accuracy",
    "pass_at_k",
    "answer_tokens",
    "truncated",
    "repetition",
    "nll",
    "nll_difference",
    "perplexity",
    "kl",
    "top1_agreement",
    "wiped_regions",
    "retained_iou",
    "mean_slots",
    "peak_slots",
    "mean_kv_bytes",
    "kv_bytes",
    "mean_kept_bytes",
    "kept_bytes",
    "mean_unfreed_bytes",
    "mean_freed_bytes",
    "auxiliary_bytes",
    "peak_process_bytes",
    "peak_device_bytes",
    "read_slots",
    "read_bytes",
    "mass_recall",
    "mass_recall_worst",
    "communities",
    "modularity",
    "index_share",
    "observe_seconds",
    "background_seconds",
    "index_seconds",
    "exposed_seconds",
    "decode_tokens_per_second",
    "events",
    "event_seconds",
    "event_time_share",
)
# An answer of a replay is a few tokens by design: how many they are tells nothing about the method.
_ONLY_GENERATED = {"answer_tokens", "truncated", "repetition"}
# Most methods free whatever they evict.
_ONLY_ABOVE_ZERO = {"mean_unfreed_bytes"}
ROOM_FOR_GROWTH = (
    "KV storage is larger than the dense model's although no more slots are stored: compressed caches take room for many "
    "tokens at once, which weighs on short samples"
)


def print_table(summary: Mapping[str, Any], console: Console) -> None:
    """Print the table and, below it, whatever the reader must not miss."""
    console.print(_title(summary))
    console.print(build_table(summary))
    for note in notes(summary):
        console.print(note)


def build_table(summary: Mapping[str, Any]) -> Table:
    """Metrics as mean ± standard deviation over samples; a metric that no sample has is left out."""
    run, metrics = summary["run"], summary["metrics"]
    has_press = run["press"] != "dense"
    table = Table()
    table.add_column("mean ± std over samples")
    if has_press:
        table.add_column(run["press"], justify="right")
    table.add_column("dense", justify="right")
    for row in ROWS:
        if row.name in _ONLY_GENERATED and run["mode"] != "generate":
            continue
        if row.name in SHARED_PEAKS and not _cell(metrics.get(row.dense), row.write):
            continue
        if row.name in _ONLY_ABOVE_ZERO and not metrics.get(row.name, {}).get("mean"):
            continue
        cells = [_cell(metrics.get(name), row.write) for name in (row.name, row.dense) if name or has_press]
        cells = cells if has_press else cells[-1:]
        if any(cells):
            table.add_row(row.title, *(cell or "–" for cell in cells))
    return table


def _title(summary: Mapping[str, Any]) -> Text:
    run = summary["run"]
    lines = [f"press={run['press']}"]
    if run["press"] != "dense":
        lines[0] += "".join(f" {part}={run[part]}" for part in ("scorer", "allocator") if run[part] is not None)
        lines.append(_budget(run))
    lines.append(
        f"{run['model']}, task={run['task']}, mode={run['mode']}, seed {run['seed']}, {summary['num_samples']} samples"
    )
    return Text("\n".join(lines), style="bold")


def _budget(run: Mapping[str, Any]) -> str:
    if run["num_sinks"] is None:
        return f"budget: {run['budget']} a kv head, of the context, once"
    if run["interval"] is None:
        # Retrieval chooses anew at every step; how many recent tokens it reads may be settled when the prompt is there.
        recent = "the" if run["num_recent"] is None else run["num_recent"]
        return f"budget: {run['budget']} a kv head and step, {run['num_sinks']} sinks and {recent} newest tokens among them"
    return (
        f"budget: {run['budget']} a kv head, {run['num_sinks']} sinks and {run['num_recent']} recent tokens among them, "
        f"an event every {run['interval']} tokens"
    )


def _cell(summary: Mapping[str, Any] | None, write: Callable[[float], str]) -> str:
    if summary is None or summary["mean"] is None:
        return ""
    # Figures that are the same in every sample, such as a peak, need no "± 0".
    spread = f" ± {write(summary['std']).lstrip('+')}" if summary["std"] else ""
    return write(summary["mean"]) + spread


def notes(summary: Mapping[str, Any]) -> list[Text]:
    """Warnings about the run as a whole."""
    found = []
    run, bound = summary["run"], summary.get("bound_samples")
    if summary["budget_bound"] is False:
        found.append(Text(never_bound(summary), style="bold red"))
    elif bound is not None and bound < (measured := summary["metrics"]["events"]["n"]):
        found.append(Text(f"The budget {bound_in(bound, measured)}.", style="yellow"))
    compared = summary["metrics"].get("compared_tokens")
    if compared is not None and compared["mean"] == 0 and run["mode"] == "replay":
        least = "two tokens" if run["interval"] is None else f"one interval of {run['interval']} tokens"
        held = "had" if run["interval"] is None else "was longer than"
        found.append(
            Text(f"No trace {held} {least}, so NLL, KL and agreement have nothing to compare.", style="yellow")
        )
    failed = summary["failed_samples"]
    if failed:
        reasons = "; ".join(f"{sample}: {reason}" for sample, reason in list(failed.items())[:3])
        found.append(Text(f"{len(failed)} samples failed and count in no metric ({reasons})", style="bold red"))
    skipped = summary.get("skipped_records", ())
    if skipped:
        found.append(Text(f"{len(skipped)} malformed records were skipped, the first: {skipped[0]}", style="yellow"))
    if only_room_is_larger(lambda name: summary["metrics"].get(name, {}).get("mean")):
        found.append(Text(f"{ROOM_FOR_GROWTH}.", style="yellow"))
    reused = summary["metrics"].get("dense_reused")
    if reused is not None and reused["mean"]:
        found.append(
            Text(
                "The dense model's side was read from an earlier run, with the speed it had then; reuse_dense=false runs it "
                "side by side.",
                style="dim",
            )
        )
    return found


def bound_in(bound: int, samples: int) -> str:
    """`bound in 3 of 8 samples; …`, said of a budget."""
    return f"bound in {bound} of {samples} samples; in the others nothing was evicted or left unread"


def only_room_is_larger(mean: Callable[[str], float | None]) -> bool:
    """Whether more bytes than the dense model's hold no more slots, so that the difference is room for growth.

    Args:
        mean: of a metric, by its name; None if no sample has it.
    """
    for stored, slots in (("kv_bytes", "peak_slots"), ("mean_kv_bytes", "mean_slots")):
        values = [mean(name) for name in (stored, f"dense_{stored}", slots, f"dense_{slots}")]
        if None not in values and values[0] > values[1] and values[2] <= values[3]:
            return True
    return False
