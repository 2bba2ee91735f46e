"""Tables and figures of finished runs, drawn from their folders alone."""

from kvstitch.evaluation.report.entries import Entry
from kvstitch.evaluation.report.published import papers_of
from kvstitch.evaluation.report.runs import Problem, Run, find_runs
from kvstitch.evaluation.report.sections import Section, sections_of
from kvstitch.evaluation.report.write import write_report

__all__ = [
    "Entry",
    "Problem",
    "Run",
    "Section",
    "find_runs",
    "papers_of",
    "sections_of",
    "write_report",
]
