"""The closing table of a run, drawn from `metrics.json` alone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Row(NamedTuple):
    """One line of the table: a metric, its counterpart of the dense model, how to write a value."""

    title: str
    metric: str
    dense_metric: str | None
    write: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def write_bytes(value: float) -> str:
    """`3.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


ROWS = (
    Row("answers right", "accuracy", "dense_accuracy", _percent),
    Row("right in one of the draws", "pass_at_k", "dense_pass_at_k", _percent),
    Row("answer tokens", "answer_tokens", "dense_answer_tokens", "{:.1f}".format),
    Row("answers cut short", "truncated", "dense_truncated", _percent),
    Row("repeated 4-grams", "repetition", "dense_repetition", _percent),
    Row("NLL, nats a token", "nll", "dense_nll", "{:.4f}".format),
    Row("NLL difference", "nll_difference", None, "{:+.4f}".format),
    Row("KL(dense || pressed)", "kl", None, "{:.4f}".format),
    Row("top-1 agreement", "top1_agreement", None, _percent),
    Row("regions wiped out", "wiped_regions", None, _percent),
    Row("kept again (IoU)", "retained_iou", None, _percent),
    Row("slots a kv head, mean", "mean_slots", "dense_mean_slots", "{:.0f}".format),
    Row("slots a kv head, peak", "peak_slots", "dense_peak_slots", "{:.0f}".format),
    Row("KV storage, mean", "mean_kv_bytes", "dense_mean_kv_bytes", write_bytes),
    Row("KV storage, peak", "kv_bytes", "dense_kv_bytes", write_bytes),
    Row("held beside it, peak", "auxiliary_bytes", None, write_bytes),
    Row("GPU memory, peak", "peak_device_bytes", "dense_peak_device_bytes", write_bytes),
    Row("slots read, kv head and step", "read_slots", None, "{:.0f}".format),
    Row("bytes read a step, index included", "read_bytes", "dense_read_bytes", write_bytes),
    Row("attention mass recall", "mass_recall", None, _percent),
    Row("… of the worst tenth of heads", "mass_recall_worst", None, _percent),
    Row("communities a graph", "communities", None, "{:.0f}".format),
    Row("modularity", "modularity", None, "{:.3f}".format),
    Row("bytes held beside K and V", "index_share", None, _percent),
    Row("seconds for edges", "observe_seconds", None, "{:.2f}".format),
    Row("seconds in the background", "background_seconds", None, "{:.2f}".format),
    Row("seconds for indices", "index_seconds", None, "{:.2f}".format),
    Row("… waiting for the background", "exposed_seconds", None, "{:.2f}".format),
    Row("decoded tokens/s", "decode_tokens_per_second", "dense_decode_tokens_per_second", "{:.1f}".format),
    Row("events a sample", "events", None, "{:.1f}".format),
    Row("seconds an event", "event_seconds", None, "{:.3f}".format),
    Row("time in events", "event_time_share", None, _percent),
)
# An answer of a replay is a few tokens by design: how many they are tells nothing about the method.
_ONLY_GENERATED = {"answer_tokens", "truncated", "repetition"}


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
        if row.metric in _ONLY_GENERATED and run["mode"] != "generate":
            continue
        cells = [_cell(metrics.get(name), row.write) for name in (row.metric, row.dense_metric) if name or has_press]
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
    if summary["budget_bound"] is False:
        found.append(
            Text(
                f"THE BUDGET NEVER BOUND: no sample ever held more than {summary['run']['budget']} when an event was due, so "
                "nothing was evicted and the press was not tested. Lower budget or interval, take longer samples, or "
                "compress the prompt, too (press.compress_prompt=true), where answers are shorter than an interval of "
                f"{summary['run']['interval']} tokens.",
                style="bold red",
            )
        )
    compared = summary["metrics"].get("compared_tokens")
    if compared is not None and compared["mean"] == 0 and summary["run"]["mode"] == "replay":
        found.append(
            Text(
                f"No trace was longer than one interval of {summary['run']['interval']} tokens, so NLL, KL and agreement "
                "have nothing to compare.",
                style="yellow",
            )
        )
    failed = summary["failed_samples"]
    if failed:
        reasons = "; ".join(f"{sample}: {reason}" for sample, reason in list(failed.items())[:3])
        found.append(Text(f"{len(failed)} samples failed and count in no metric ({reasons})", style="bold red"))
    skipped = summary.get("skipped_records", ())
    if skipped:
        found.append(Text(f"{len(skipped)} malformed records were skipped, the first: {skipped[0]}", style="yellow"))
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
