"""What a reader of a section's tables must not miss."""

from collections import defaultdict
from collections.abc import Sequence

from kvstitch.evaluation.report.entries import Entry
from kvstitch.evaluation.report.runs import Run
from kvstitch.evaluation.report.sections import Section
from kvstitch.evaluation.table import bound_in


def warnings(section: Section) -> list[str]:
    """Each once, in the order of the entries."""
    lines = []
    for entry in section.entries:
        name = _name(entry)
        if entry.never_bound:
            lines.append(f"{name}: the budget never bound, so the press was not tested")
        elif entry.bound is not None and entry.bound[0] < entry.bound[1]:
            lines.append(f"{name}: the budget {bound_in(*entry.bound)}")
        for run in entry.runs:
            if run.summary["failed_samples"]:
                names = ", ".join(run.summary["failed_samples"])
                lines.append(f"{name}: failed samples count in no figure ({names})")
            if skipped := run.summary.get("skipped_records"):
                lines.append(f"{name}: {len(skipped)} malformed records were skipped, the first: {skipped[0]}")
    return [*dict.fromkeys(lines), *_repeats(section)]


def _repeats(section: Section) -> list[str]:
    """Which seeds changed nothing, with the entries of which this is so."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for entry in section.entries:
        for kept in entry.runs:
            same = [kept, *(run for run, other in entry.repeats if other is kept)]
            if len(same) > 1:
                found[_seeds(same)].append(_name(entry))
    return [
        f"{'; '.join(names)}: seeds {', '.join(seeds[:-1])} and {seeds[-1]} gave the same samples and the same "
        "values; counted once"
        for seeds, names in found.items()
    ]


def _seeds(runs: Sequence[Run]) -> tuple[str, ...]:
    """As short as tells them apart: a sweep may change the task's seed alone."""
    seeds = tuple(str(run.config["seed"]) for run in runs)
    return seeds if len(set(seeds)) == len(seeds) else tuple(run.seeds for run in runs)


def _name(entry: Entry) -> str:
    return ", ".join(filter(None, (entry.method, entry.budget)))
