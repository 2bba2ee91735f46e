"""Run folders read back; the shards of one evaluation become one run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from kvstitch.evaluation.records import CONFIG, ERROR, METRICS, RUN_META, RunFolder, config_hash
from kvstitch.evaluation.summary import summary


@dataclass(frozen=True)
class Run:
    """A finished run, or one put together from its shards.

    Args:
        path: its folder, or that of the first shard.
        config: its resolved configuration; a merged run is shard 0 of 1.
        summary: as in `metrics.json`.
        records: as in `predictions.jsonl`, in the task's order.
        meta: as in `run_meta.json`.
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    meta: Mapping[str, Any]

    @property
    def labels(self) -> Mapping[str, Any]:
        return self.summary["run"]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name


@dataclass(frozen=True)
class Problem:
    """A run that is not in the report, and why."""

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
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder of runs")
        found = [path] if _is_run(path) else sorted(child for child in path.iterdir() if _is_run(child))
        folders |= dict.fromkeys(found)
    runs, problems = [], []
    for folder in folders:
        read = _read(folder)
        (runs if isinstance(read, Run) else problems).append(read)
    merged, incomplete = _merge_shards(runs)
    return merged, [*problems, *incomplete]


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / CONFIG).exists() or (path / ERROR).exists())


def _read(path: Path) -> Run | Problem:
    folder = RunFolder(path)
    metrics = folder.read_json(METRICS)
    if metrics is None:
        error = path / ERROR
        if error.exists():
            return Problem(path, "failed: " + error.read_text(encoding="utf-8").strip().splitlines()[0])
        return Problem(path, "not finished; give its command again")
    config = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
    return Run(path, config, metrics, folder.read_records(), folder.read_json(RUN_META) or {"sessions": []})


def _merge_shards(runs: Sequence[Run]) -> tuple[list[Run], list[Problem]]:
    """Runs that differ in `task.shard` alone become what the undivided run would have been, record for record."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[config_hash(_whole(run.config))].append(run)
    merged, problems = [], []
    for group in groups.values():
        divided = [run for run in group if run.config["task"].get("num_shards", 1) > 1]
        merged.extend(run for run in group if run not in divided)
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
            else:
                merged.append(_joined([shards[index] for index in range(count)]))
    return merged, problems


def _joined(shards: Sequence[Run]) -> Run:
    first = shards[0]
    # Shard i holds samples i, i + n, …: dealt out like cards, taken back in the same way.
    rounds = zip_longest(*(shard.records for shard in shards))
    records = [record for one_each in rounds for record in one_each if record is not None]
    sessions = [session for shard in shards for session in shard.meta["sessions"]]
    # Every shard reads the whole file and names all that it skipped.
    whole = summary(records, first.labels, first.summary.get("skipped_records", ()))
    return Run(first.path, _whole(first.config), whole, records, {"sessions": sessions})


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "task": {**config["task"], "shard": 0, "num_shards": 1}}
