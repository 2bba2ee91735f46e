"""Tables and figures of finished runs, from their folders alone.

python scripts/report.py runs
python scripts/report.py runs/needle-* --output needles
"""

import argparse
import sys
from pathlib import Path

from broken_pipe import until_the_reader_leaves
from rich.console import Console

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.report import find_runs, papers_of, sections_of, write_report
from kvstitch.evaluation.report.runs import grouped
from kvstitch.evaluation.report.tables import print_sections

# Into a file or a pipe nothing has to be folded.
_FILE_WIDTH = 160


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 1 nothing to report, 2 a wrong command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders that hold them")
    parser.add_argument("--output", type=Path, help="folder to write into; default: report/ in the first folder given")
    parser.add_argument("--title", default="kvstitch", help="of the page")
    parser.add_argument("--no-papers", action="store_true", help="leave out what the papers state for the same methods")
    options = parser.parse_args(arguments)
    first = options.runs[0]
    parent = first.parent if (first / "config.yaml").exists() else first
    try:
        runs, problems = find_runs(options.runs)
        if not runs:
            reasons = [f"{reason}: {', '.join(names)}" for reason, names in grouped(problems)]
            raise RunError("\n".join(["no finished run in " + ", ".join(map(str, options.runs)), *reasons]))
        sections, papers = sections_of(runs), () if options.no_papers else papers_of(runs)
        console = Console()
        print_sections(sections, console if console.is_terminal else Console(width=_FILE_WIDTH), problems, papers)
        for path in write_report(options.output or parent / "report", sections, problems, options.title, papers):
            print(path)
    except BrokenPipeError:
        raise
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
