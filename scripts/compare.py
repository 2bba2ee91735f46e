"""Compares choices on the same samples: differences sample by sample, from the folders of finished runs.

python scripts/compare.py runs --base GlobalTopK
python scripts/compare.py runs --part scorer --base TOVA --metric top1_agreement
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.report import find_runs
from kvstitch.evaluation.report.paired import PARTS, Comparison, compare
from kvstitch.evaluation.report.runs import grouped


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 compared, 1 nothing to compare, 2 a wrong command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders that hold them")
    parser.add_argument("--base", required=True, help="the choice that others are compared with, e.g. GlobalTopK")
    parser.add_argument("--part", choices=PARTS, default="allocator", help="what is compared (default: allocator)")
    parser.add_argument("--metric", default="kl", help="of predictions.jsonl (default: kl)")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table")
    options = parser.parse_args(arguments)
    try:
        runs, problems = find_runs(options.runs)
        for reason, names in grouped(problems):
            print(f"left out, {reason}: {', '.join(names)}", file=sys.stderr)
        rows = compare(runs, options.base, options.part, options.metric)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    titles = ["the rest", options.part, f"{options.metric}, {options.base}", options.metric, "difference", "lower in"]
    lines = [_cells(row) for row in rows]
    if options.markdown:
        for line in [titles, ["---", "---", *["---:"] * 4], *lines]:
            print(f"| {' | '.join(line)} |")
        return 0
    table = Table(*titles, title=f"sample by sample against {options.base}: mean difference ± standard error")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    return 0


def _cells(row: Comparison) -> list[str]:
    error = "" if row.error is None else f" ± {row.error:.4f}"
    numbers = [f"{row.base:.4f}", f"{row.mean:.4f}", f"{row.difference:+.4f}{error}", f"{row.lower} of {row.n}"]
    return [row.others, row.choice, *numbers]


if __name__ == "__main__":
    sys.exit(main())
