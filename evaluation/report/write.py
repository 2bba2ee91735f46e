"""Everything a report writes, into one folder."""

from collections.abc import Sequence
from pathlib import Path

from kvstitch.evaluation.paper_tables import PaperTable
from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report.page import page
from kvstitch.evaluation.report.runs import Problem
from kvstitch.evaluation.report.sections import Section
from kvstitch.evaluation.report.tables import markdown, summary_csv, summary_json


def write_report(
    folder: Path,
    sections: Sequence[Section],
    problems: Sequence[Problem] = (),
    title: str = "kvstitch",
    papers: Sequence[PaperTable] = (),
) -> list[Path]:
    """Write `summary.csv`, `summary.json`, `report.md` and `report.html`; earlier ones are replaced.

    Args:
        folder: made if need be.
        sections: what is in the report.
        problems: runs that are not, listed at the end.
        title: of the page.
        papers: published tables, shown where they have one of a section's methods and budgets.

    Raises:
        RunError: the disk is full or read-only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "summary.csv": summary_csv(sections, papers),
        "summary.json": summary_json(sections, problems, papers),
        "report.md": markdown(sections, problems, papers),
        "report.html": page(sections, problems, title, papers),
    }
    for name, content in contents.items():
        write_text(folder / name, content)
    return [folder / name for name in contents]
