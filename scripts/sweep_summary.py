"""What the runs of a sweep give together: a run has one seed, so the spread over several stands beside their states."""

from collections.abc import Sequence
from pathlib import Path

from sweep import Job, SweepFolder

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.tables import summary_json

SUMMARY = "summary.json"


def write_summary(sweep: SweepFolder, jobs: Sequence[Job]) -> Path | None:
    """The report's `summary.json` of the finished jobs alone; returns its path, or None if none of them finished.

    Raises:
        RunError: the disk is full or read-only.
    """
    runs, problems = find_runs(dict.fromkeys(Path(job.folder) for job in jobs if job.succeeded))
    if not runs:
        return None
    path = sweep.path / SUMMARY
    write_text(path, summary_json(sections_of(runs), problems))
    return path
