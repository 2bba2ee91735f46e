"""What the runs of a sweep give together: a run has one seed, so the spread over several stands beside their states."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweep import SUMMARY, Job, SweepFolder

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.tables import summary_json


def write_summary(sweep: SweepFolder, jobs: Sequence[Job]) -> Path | None:
    """The report's `summary.json` of the jobs' runs alone; returns its path, or None if no run is in it.

    `not_in_report` says of the runs what the report would say, and names every job without a complete result: its
    `state` and `overrides` as well, and a `folder` of None if it had none.

    Raises:
        RunError: the disk is full or read-only.
    """
    folders = dict.fromkeys(Path(job.folder) for job in jobs if job.folder is not None)
    # A job may have failed before there was anything to write, or because of what stands in its folder's place.
    runs, problems = find_runs(folder for folder in folders if folder.is_dir())
    content = json.loads(summary_json(sections_of(runs), problems))
    content["not_in_report"] = _with_jobs(content["not_in_report"], [job for job in jobs if not job.succeeded])
    path = sweep.path / SUMMARY
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path if runs else None


def _with_jobs(entries: Sequence[dict[str, Any]], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The report's entries, with the state of the job that each belongs to, and one for each job that has none."""
    left = {number: _entry(job) for number, job in enumerate(jobs)}
    found = []
    for entry in entries:
        number = next((number for number, own in left.items() if own["folder"] == entry["folder"]), None)
        found.append(entry if number is None else left.pop(number) | entry)
    return [*found, *left.values()]


def _entry(job: Job) -> dict[str, Any]:
    return {
        "folder": None if job.folder is None else Path(job.folder).name,
        "reason": job.reason or job.state,
        "state": job.state,
        "overrides": list(job.overrides),
    }
