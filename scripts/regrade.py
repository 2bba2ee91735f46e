"""Grade the answers of finished or interrupted runs again and say what changes; nothing is written.

    python scripts/regrade.py runs/gsm8k-ams-tova-256-0123456789ab ...
    python scripts/regrade.py runs                                       (every run with answers in it)

The exit status is 0 if every score is what it was, 2 if one is not, 1 if a folder could not be graded; the others are.
"""

import itertools
import sys
from pathlib import Path

from broken_pipe import until_the_reader_leaves

from kvstitch.evaluation.records import PREDICTIONS, RunError
from kvstitch.evaluation.regrading import regrade
from kvstitch.evaluation.report.runs import run_folders


def main() -> int:
    """See above."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 1
    found = [_with_answers(path) for path in map(Path, sys.argv[1:])]
    status = 0 if all(found) else 1
    for folder in itertools.chain.from_iterable(found):
        try:
            result = regrade(folder)
        except (RunError, ValueError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
            continue
        print(folder)
        for name, before in result.before.items():
            if before is not None:
                print(f"  {name}: {before:.4f} recorded, {result.after[name]:.4f} now")
        for change in result.changes:
            place = f"{change.sample}, answer {change.answer}, {change.side}"
            print(f"  {place}: {change.before:g} recorded, {change.after:g} now")
            status = status or 2
    return status


def _with_answers(path: Path) -> list[Path]:
    """The path if it is a run or nothing at all, which grading tells; else the runs with answers in it."""
    folders = run_folders(path)
    if folders == [path]:
        return folders
    answered = [folder for folder in folders if (folder / PREDICTIONS).exists()]
    if not answered:
        print(
            f"error: {path} is no run folder and holds none with answers; give run folders, or what holds them",
            file=sys.stderr,
        )
    return answered


if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
