"""Markdown tables of the records of `retrieval_quality`."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstitch.evaluation.paper_tables import PaperTable, written

Record = Mapping[str, Any]
# The methods that the closing lines speak of, by their names in the configuration.
OURS, BASELINES, ORACLE, GAP_FROM = "recommended", ("quest", "paper"), "oracle", "quest"
_GAP_BUDGET = 256

_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("top-1 %", "top1_agreement", lambda x: f"{100 * x:.1f}"),
    ("ΔNLL", "nll_difference", "{:+.3f}".format),
    ("mass %", "mass_recall", lambda x: f"{100 * x:.1f}"),
    ("worst heads %", "mass_recall_worst", lambda x: f"{100 * x:.1f}"),
    ("slots", "read_slots", "{:.0f}".format),
    ("MB a step", "read_bytes", lambda x: f"{x / 1e6:.1f}"),
    ("index %", "index_share", lambda x: f"{100 * x:.1f}"),
    ("communities", "communities", "{:.0f}".format),
    ("modularity", "modularity", "{:.2f}".format),
    ("γ", "resolution", "{:.1f}".format),
    ("right %", "accuracy", lambda x: f"{100 * x:.0f}"),
)


def markdown(records: Sequence[Record]) -> str:
    """For each length: KL by method and budget over all texts and for each, everything else by budget, and verdicts."""
    parts = []
    for length in _unique(record["length"] for record in records):
        same = [record for record in records if record["length"] == length]
        texts = _unique(record["text"] for record in same)
        pieces = len(_unique((record["text"], record["piece"]) for record in same))
        parts.append(f"## {length} tokens prefilled, {pieces} prompts: {', '.join(texts)}\n")
        parts.append("KL(dense ‖ sparse) in nats, mean ± standard deviation over prompts\n\n" + _kl_table(same))
        for text in texts if len(texts) > 1 else ():
            parts.append(
                f"{text}: KL / top-1 %\n\n" + _kl_table([r for r in same if r["text"] == text], with_agreement=True)
            )
        for budget in _unique(record["budget"] for record in same):
            parts.append(f"budget {budget}\n\n" + _detail_table([r for r in same if r["budget"] == budget]))
        parts.append("\n".join(f"- {line}" for line in verdicts(same)) + "\n")
    return "\n".join(parts)


def published(records: Sequence[Record], papers: Sequence[PaperTable], rows: Mapping[str, Sequence[str]]) -> str:
    """What papers state, beside KL over all texts and lengths; `rows` are the names of a method's rows. Nothing without any."""
    parts = []
    for table in papers:
        lines = [["dense", "", "dense", written(table.dense), "–"]] if table.dense is not None else []
        for method, budget in _unique((record["method"], record["budget"]) for record in records):
            for row in table.rows:
                figure = table.figure(row, budget) if row.name in rows.get(method, ()) else None
                if figure is not None:
                    kl = mean(_values(records, method, budget, "kl"))
                    lines.append([method, str(budget), row.name, written(figure), f"{kl:.4f}"])
        if any(line[0] != "dense" for line in lines):
            head = ["method here", "budget here", "in the paper", f"paper: {table.measured}", "here: KL"]
            parts.append(
                f"\nPublished: {table.name}. The paper's: {written(table.model)}; {table.task}. Another model and other data than "
                f"here, so that only the order of methods compares\n\n{_table([head, *lines])}"
            )
    return "".join(parts)


def overview(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a text, length and method: KL at each budget, mean over pieces."""
    rows = []
    for length in _unique(record["length"] for record in records):
        for text in _unique(record["text"] for record in records):
            same = [record for record in records if (record["length"], record["text"]) == (length, text)]
            for method in _unique(record["method"] for record in same):
                row: dict[str, Any] = {"kind": f"KL on {text}, {length} tokens", "method": method}
                for budget in _unique(record["budget"] for record in same):
                    kl = mean(_values(same, method, budget, "kl"))
                    row[str(budget)] = None if kl is None else round(kl, 4)
                rows.append(row)
    return rows


def verdicts(records: Sequence[Record]) -> list[str]:
    """Where the recommended recipe does not beat a baseline in KL, and how much of the gap to the oracle it closes."""
    methods = _unique(record["method"] for record in records)
    lines = []
    for baseline in BASELINES:
        if not {OURS, baseline} <= set(methods):
            continue
        lost = [
            f"{text} at {budget}"
            for text in _unique(record["text"] for record in records)
            for budget in _unique(record["budget"] for record in records)
            if not _kl(records, OURS, text, budget) < _kl(records, baseline, text, budget)
        ]
        lines.append(f"{OURS} beats {baseline} in KL " + (f"except on {', '.join(lost)}" if lost else "everywhere"))
    if {OURS, ORACLE, GAP_FROM} <= set(methods) and any(r["budget"] == _GAP_BUDGET for r in records):
        for text in _unique(record["text"] for record in records):
            ours, oracle, start = (_kl(records, name, text, _GAP_BUDGET) for name in (OURS, ORACLE, GAP_FROM))
            lines.append(
                f"{OURS} closes {100 * (start - ours) / (start - oracle):.0f} % of the KL gap between {GAP_FROM} and "
                f"{ORACLE} at {_GAP_BUDGET} on {text}"
            )
    return lines


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.fmean(values) if values else None


def _kl_table(records: Sequence[Record], with_agreement: bool = False) -> str:
    budgets = _unique(record["budget"] for record in records)
    rows = [["method", *map(str, budgets)]]
    for method in _unique(record["method"] for record in records):
        row = [method]
        for budget in budgets:
            values = _values(records, method, budget, "kl")
            cell = f"{mean(values):.4f}" if values else "–"
            if values and with_agreement:
                cell += f" / {100 * mean(_values(records, method, budget, 'top1_agreement')):.1f}"
            elif len(values) > 1:
                cell += f" ± {statistics.stdev(values):.4f}"
            row.append(cell)
        rows.append(row)
    return _table(rows)


def _detail_table(records: Sequence[Record]) -> str:
    shown = [column for column in _COLUMNS if any(r["metrics"].get(column[1]) is not None for r in records)]
    rows = [["method", "KL", *(title for title, _, _ in shown)]]
    for method in _unique(record["method"] for record in records):
        same = [record for record in records if record["method"] == method]
        row = [method, f"{mean([record['metrics']['kl'] for record in same]):.4f}"]
        for _, name, write in shown:
            value = mean([r["metrics"][name] for r in same if r["metrics"].get(name) is not None])
            row.append("–" if value is None else write(value))
        rows.append(row)
    dense = [r["metrics"]["dense_read_bytes"] for r in records if r["metrics"].get("dense_read_bytes") is not None]
    right = [r["metrics"]["dense_accuracy"] for r in records if r["metrics"].get("dense_accuracy") is not None]
    note = f"\ndense reads {mean(dense) / 1e6:.1f} MB a step" if dense else ""
    return _table(rows) + note + (f" and answers {100 * mean(right):.0f} % right\n" if right else "\n" if note else "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _kl(records: Sequence[Record], method: str, text: str, budget: int) -> float:
    return mean(_values([record for record in records if record["text"] == text], method, budget, "kl"))


def _values(records: Sequence[Record], method: str, budget: int, name: str) -> list[float]:
    same = [r for r in records if r["method"] == method and r["budget"] == budget]
    return [r["metrics"][name] for r in same if r["metrics"].get(name) is not None]


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
