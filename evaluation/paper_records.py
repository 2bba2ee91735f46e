"""What a paper states beside a run, kept in its folder, so that a report needs nothing else."""

from collections.abc import Iterable

from kvstitch.evaluation.paper_reading import read_tables
from kvstitch.evaluation.paper_tables import PaperTable
from kvstitch.evaluation.records import PAPER, RunError, RunFolder


def record_tables(folder: RunFolder, tables: Iterable[PaperTable]) -> None:
    """Add tables to those of a run's folder; one of the same name is replaced, and so is a file that is damaged.

    Others stay: two experiments can come to the same run, since its paper is no part of what it computes.
    """
    try:
        before = recorded_tables(folder)
    except RunError:
        before = ()
    kept = {table.name: table for table in (*before, *tables)}
    if tuple(kept.values()) != before:
        folder.write_json(PAPER, {"tables": [table.plain() for table in kept.values()]})


def recorded_tables(folder: RunFolder) -> tuple[PaperTable, ...]:
    """What `record_tables` kept; nothing if the run has no paper.

    Raises:
        RunError: it cannot be read any more.
    """
    found: list[PaperTable] = []
    try:
        content = folder.read_json(PAPER)
        for table in () if content is None else content["tables"]:
            paper = {"source": table.pop("source"), "tables": [table]}
            found += read_tables(paper, PAPER)
    except (RunError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{folder.path / PAPER} is damaged, so that no paper's figures are taken from it; the run's command writes it anew"
        ) from error
    return tuple(found)
