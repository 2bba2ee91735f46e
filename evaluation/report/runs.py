"""Run folders read back; the shards of one evaluation become one run."""

import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvstitch.evaluation.paper_records import recorded_tables
from kvstitch.evaluation.paper_tables import PaperTable
from kvstitch.evaluation.records import (
    CONFIG,
    ERROR,
    KEPT_POSITIONS,
    METRICS,
    REGIONS,
    RUN_META,
    RunError,
    RunFolder,
    config_hash,
)
from kvstitch.evaluation.report.faults import fault
from kvstitch.evaluation.summary import summary

# Ends of the names of what is measured anew in every run and never comes out twice; all else is computed.
_MEASURED = ("seconds", "_per_second", "_time_share", "peak_process_bytes", "peak_device_bytes", "dense_reused")


@dataclass(frozen=True)
class Run:
    """A finished run, or one put together from its shards.

    Args:
        path: its folder, or that of the first shard.
        config: its resolved configuration; a merged run is shard 0 of 1.
        summary: as in `metrics.json`.
        records: as in `predictions.jsonl`, in the task's order.
        meta: as in `run_meta.json`.
        papers: as in `paper.json`.
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    meta: Mapping[str, Any]
    papers: tuple[PaperTable, ...] = ()

    @property
    def labels(self) -> Mapping[str, Any]:
        return self.summary["run"]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def seeds(self) -> str:
        """`1`, or `1 (task.seed=2)` where the task has another."""
        seed, of_task = self.config["seed"], self.config["task"].get("seed", self.config["seed"])
        return f"{seed}" if of_task == seed else f"{seed} (task.seed={of_task})"

    @cached_property
    def outcome(self) -> str:
        """A hash of all that was computed, seconds and the like left out: the same samples with the same values have the same."""
        return config_hash({"records": [_computed(record) for record in self.records]})

    @property
    def shortcomings(self) -> tuple[int, float]:
        """Failures, then the share of samples whose dense seconds are another run's: of equal runs the one with the least counts."""
        reused = self.summary["metrics"].get("dense_reused", {}).get("mean")
        return len(self.summary["failed_samples"]), reused or 0.0


def _computed(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = record.get("metrics") or {}
    return {**record, "metrics": {name: value for name, value in metrics.items() if not name.endswith(_MEASURED)}}


@dataclass(frozen=True)
class Problem:
    """A run that is not in the report, or not all of it, and why."""

    path: Path
    reason: str


def grouped(problems: Iterable[Problem]) -> list[tuple[str, list[str]]]:
    """Each reason once, with the names of the folders that it holds for."""
    names: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        names[problem.reason].append(problem.path.name)
    return list(names.items())


def find_runs(paths: Iterable[Path]) -> tuple[list[Run], list[Problem]]:
    """Every finished run in or directly below the given folders, shards merged, in the order of their names.

    Raises:
        FileNotFoundError: a path that is not there.
    """
    # The same folder, however it is written, is no copy of itself.
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder of runs")
        for folder in run_folders(path):
            folders.setdefault(folder.resolve(), folder)
    runs, problems = [], []
    for folder in folders.values():
        read = _read(folder)
        if isinstance(read, Run):
            runs.append(read)
            problems += [*_without_pictures(folder), *_papers(folder)[1]]
        else:
            problems.append(read)
    once, copies = _without_copies(runs)
    merged, incomplete = _merge_shards(once)
    return merged, [*problems, *copies, *incomplete]


def run_folders(path: Path) -> list[Path]:
    """The path itself if it is the folder of a run, or else those directly below it, in the order of their names."""
    if _is_run(path) or not path.is_dir():
        return [path]
    return sorted(child for child in path.iterdir() if _is_run(child))


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / CONFIG).exists() or (path / ERROR).exists())


def _read(path: Path) -> Run | Problem:
    folder = RunFolder(path)
    try:
        metrics = folder.read_json(METRICS)
        if metrics is None:
            return Problem(path, _why_unfinished(path / ERROR))
        config, records = folder.read_config(), folder.read_records()
        meta = folder.read_json(RUN_META) or {"sessions": []}
    except (RunError, OSError) as error:
        return Problem(path, str(error))
    found = fault(config, metrics, records, meta)
    return Problem(path, f"damaged: {found}") if found else Run(path, config, metrics, records, meta, _papers(path)[0])


def _why_unfinished(error: Path) -> str:
    lines = error.read_text(encoding="utf-8", errors="replace").split("\n") if error.exists() else []
    first = next((line.strip() for line in lines if line.strip()), None)
    return "not finished; give its command again" if first is None else f"failed: {first}"


def _without_pictures(path: Path) -> list[Problem]:
    """Arrays that are torn; whether they are whole is seen when they are drawn."""
    return [
        Problem(path, f"{name} is damaged, so nothing is drawn of it")
        for name in (KEPT_POSITIONS, REGIONS)
        if (path / name).exists() and not zipfile.is_zipfile(path / name)
    ]


def _papers(path: Path) -> tuple[tuple[PaperTable, ...], list[Problem]]:
    """What papers state beside a run; if it cannot be read, nothing, and why."""
    try:
        return recorded_tables(RunFolder(path)), []
    except RunError as error:
        return (), [Problem(path, str(error))]


def _without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[Problem]]:
    """Of runs with one configuration, as a copied folder makes them, the one with the fewest failures; the others named."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[config_hash(run.config)].append(run)
    kept = {key: min(group, key=lambda run: run.shortcomings) for key, group in groups.items()}
    problems = [_copy(run, kept[key]) for key, group in groups.items() for run in group if run is not kept[key]]
    return list(kept.values()), problems


def _copy(run: Run, kept: Run) -> Problem:
    return Problem(run.path, f"a copy of {kept.path}: it has the same configuration, which counts once")


def _merge_shards(runs: Sequence[Run]) -> tuple[list[Run], list[Problem]]:
    """Runs that differ in `task.shard` alone become what the undivided run would have been, record for record."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[config_hash(_whole(run.config))].append(run)
    merged, problems = [], []
    for group in groups.values():
        divided = [run for run in group if run.config["task"].get("num_shards", 1) > 1]
        whole = [run for run in group if run not in divided]
        by_count: dict[int, dict[int, Run]] = defaultdict(dict)
        for run in divided:
            by_count[run.config["task"]["num_shards"]][run.config["task"]["shard"]] = run
        for count, shards in by_count.items():
            missing = [index for index in range(count) if index not in shards]
            if missing:
                names = ", ".join(map(str, missing))
                problems.extend(
                    Problem(run.path, f"shard {index} of {count}; {names} of them not finished")
                    for index, run in sorted(shards.items())
                )
            elif whole:
                # Divided in another way, or not at all, it is the same evaluation.
                problems.extend(_copy(run, whole[0]) for _, run in sorted(shards.items()))
            else:
                whole.append(_joined([shards[index] for index in range(count)]))
        merged.extend(whole)
    return merged, problems


def _joined(shards: Sequence[Run]) -> Run:
    first = shards[0]
    # Shard i holds samples i, i + n, …: dealt out like cards, taken back in the same way.
    rounds = zip_longest(*(shard.records for shard in shards))
    records = [record for one_each in rounds for record in one_each if record is not None]
    sessions = [session for shard in shards for session in shard.meta["sessions"]]
    # Every shard reads the whole file and names all that it skipped.
    whole = summary(records, first.labels, first.summary.get("skipped_records", ()))
    papers = {table.name: table for shard in shards for table in shard.papers}
    return Run(first.path, _whole(first.config), whole, records, {"sessions": sessions}, tuple(papers.values()))


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "task": {**config["task"], "shard": 0, "num_shards": 1}}
