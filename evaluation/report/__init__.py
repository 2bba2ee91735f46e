"""Tables and figures of finished runs, drawn from their folders alone."""

from kvstitch.evaluation.report.published import PaperTable, paper_tables
from kvstitch.evaluation.report.runs import Problem, Run, find_runs
from kvstitch.evaluation.report.sections import Entry, Section, sections_of
from kvstitch.evaluation.report.write import write_report

__all__ = [
    "Entry",
    "PaperTable",
    "Problem",
    "Run",
    "Section",
    "find_runs",
    "paper_tables",
    "sections_of",
    "write_report",
]
