"""Grade the answers of finished or interrupted runs again and say what changes; nothing is written.

    python scripts/regrade.py runs/gsm8k-ams-tova-256-0123456789ab ...

The exit status is 0 if every score is what it was, 2 if one is not, 1 if a folder could not be graded; the others are.
"""

import sys
from pathlib import Path

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.regrading import regrade


def main() -> int:
    """See above."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 1
    status = 0
    for folder in map(Path, sys.argv[1:]):
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


if __name__ == "__main__":
    sys.exit(main())
