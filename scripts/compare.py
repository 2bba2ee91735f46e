"""Compares choices on the same samples: differences sample by sample, from the folders of finished runs.

python scripts/compare.py runs --base GlobalTopK
python scripts/compare.py runs --part scorer --base TOVA --metric top1_agreement
python scripts/compare.py runs --part method --base dense --metric accuracy
"""

import argparse
import sys
from pathlib import Path

from broken_pipe import until_the_reader_leaves
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.report import find_runs
from kvstitch.evaluation.report.choices import PARTS
from kvstitch.evaluation.report.paired import Comparison, compare, left_out
from kvstitch.evaluation.report.runs import grouped

_TEXT_COLUMNS = 2
# Into a file or a pipe nothing has to be folded.
_FILE_WIDTH = 160


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
        for reason, names in left_out(runs, rows, options.base, options.part, options.metric):
            print(f"left out, {reason}: {', '.join(names)}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    titles = ["the rest", options.part, f"{options.metric}, {options.base}", options.metric, "difference", "lower in"]
    lines = [_cells(row) for row in rows]
    if options.markdown:
        for line in [titles, [*["---"] * _TEXT_COLUMNS, *["---:"] * (len(titles) - _TEXT_COLUMNS)], *lines]:
            print(f"| {' | '.join(line)} |")
        return 0
    table = Table(title=Text(f"sample by sample against {options.base}: mean difference ± standard error"))
    for place, title in enumerate(titles):
        # Cut short names would be alike, and a number would be another one.
        table.add_column(Text(title), justify="left" if place < _TEXT_COLUMNS else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console = Console()
    (console if console.is_terminal else Console(width=_FILE_WIDTH)).print(table)
    return 0


def _cells(row: Comparison) -> list[str]:
    # Bytes and counts of tokens need no decimals.
    digits = 4 if max(abs(row.base), abs(row.mean)) < 1000 else 0
    form = f",.{digits}f"
    error = "" if row.error is None else f" ± {row.error:{form}}"
    # 0 more makes a zero of a negative zero.
    difference = round(row.difference, digits) + 0.0
    numbers = [f"{row.base:{form}}", f"{row.mean:{form}}", f"{difference:+{form}}{error}"]
    return [row.others, row.choice, *numbers, f"{row.lower} of {row.n}"]


if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
