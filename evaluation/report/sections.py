"""Runs that can be compared stand together: one section a model, task and mode, one entry a method and budget."""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from kvstitch.evaluation.records import config_hash
from kvstitch.evaluation.report.names import flat, told_apart, what_differs
from kvstitch.evaluation.report.runs import Run
from kvstitch.evaluation.summary import asks_nothing, perplexity, summarise

# As `Budget` reads them, in whatever case.
_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
# The press repeats what stands elsewhere in the configuration.
_REPEATED = ("press.scorer.", "press.allocator.", "press.budget", "press.interval", "press._target_")
_SEEDS = ("seed", "task.seed")
# What the dense model never sees.
_OF_PRESSES = ("budget", "decode_tokens", "press", "scorer", "allocator")


@dataclass(frozen=True)
class Value:
    """A metric over all samples of all seeds.

    Args:
        mean: over the samples.
        std: standard deviation over the samples.
        seeds_std: standard deviation over the means of the seeds; None with one seed.
        n: samples.
        seeds: runs that differ in nothing but the seed.
    """

    mean: float
    std: float | None
    seeds_std: float | None
    n: int
    seeds: int

    @property
    def error(self) -> float | None:
        """Standard error of the mean over the samples."""
        return None if self.std is None else self.std / self.n**0.5


@dataclass(frozen=True)
class Entry:
    """One method at one budget: the runs that differ in nothing but the seed.

    Args:
        method: press, scorer and allocator, and what else sets it apart from the others of its section.
        budget: as it was written, e.g. "256 tokens"; "" for the dense model.
        budget_value: as a number; None for the dense model.
        runs: by seed.
    """

    method: str
    budget: str
    budget_value: float | None
    runs: tuple[Run, ...]

    @property
    def bound(self) -> tuple[int, int] | None:
        """Samples in which the budget bound, and all that were measured; None for the dense model."""
        events = [
            record["metrics"].get("events") for run in self.runs for record in run.records if "error" not in record
        ]
        known = [count > 0 for count in events if count is not None]
        return (sum(known), len(known)) if known else None

    @property
    def never_bound(self) -> bool:
        """Whether nothing was evicted or left unread in any sample, so that the figures are the dense model's."""
        return self.bound is not None and not self.bound[0]

    def value(self, metric: str) -> Value | None:
        """A metric of this entry; None if no sample has it."""
        if metric.endswith("perplexity"):
            return self._perplexity(metric.replace("perplexity", "nll"))
        each = [[record["metrics"].get(metric) for record in run.records if "error" not in record] for run in self.runs]
        whole = summarise(number for numbers in each for number in numbers)
        if whole["mean"] is None:
            return None
        means = [mean for mean in (summarise(numbers)["mean"] for numbers in each) if mean is not None]
        spread = statistics.stdev(means) if len(means) > 1 else None
        return Value(whole["mean"], whole["std"], spread, whole["n"], len(means))

    def _perplexity(self, metric: str) -> Value | None:
        nll = self.value(metric) if all(asks_nothing(run.records) for run in self.runs) else None
        if nll is None:
            return None
        found = perplexity({name: value for name, value in asdict(nll).items() if name != "seeds"})
        return None if found["mean"] is None else Value(**found, seeds=nll.seeds)


@dataclass(frozen=True)
class Section:
    """What was evaluated on the same samples of the same model.

    Args:
        title: task, model, mode, and the options that tell it from the others, as few as do.
        entries: ordered by method and budget, the dense model first.
        options: all options in which it differs from other sections of the same task, model and mode; "" if one or none.
    """

    title: str
    entries: tuple[Entry, ...]
    options: str = ""

    @property
    def pressed(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.budget_value is not None)

    @property
    def methods(self) -> list[str]:
        """Methods other than the dense model, in order."""
        return list(dict.fromkeys(entry.method for entry in self.pressed))

    @property
    def budgets(self) -> list[tuple[float, str]]:
        """Budgets in ascending order, as number and text."""
        return sorted({(entry.budget_value, entry.budget) for entry in self.pressed})

    @property
    def samples(self) -> str:
        """How many samples and which seeds: `6 samples an entry; seeds 1, 2.`"""
        counts = sorted({sum(len(run.records) for run in entry.runs) for entry in self.entries})
        seeds = sorted({run.config["seed"] for entry in self.entries for run in entry.runs})
        many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        samples = "sample" if counts == [1] else "samples"
        return f"{many} {samples} an entry; seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."

    @property
    def dense_reused(self) -> tuple[int, int]:
        """Samples whose dense side was read from the record of an earlier run, and all of which it is known."""
        found = [value for entry in self.entries if (value := entry.value("dense_reused")) is not None]
        return round(sum(value.mean * value.n for value in found)), sum(value.n for value in found)

    def dense(self, metric: str) -> Value | None:
        """A metric of the dense model on the same samples: its own run's, or that of the entry with most samples."""
        found = [value for entry in self.entries if (value := entry.value(f"dense_{metric}")) is not None]
        return max(found, key=lambda value: value.n, default=None)


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """Sort runs into sections and entries."""
    places: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        places[config_hash(_place(run))].append(run)
    named: dict[str, list[list[Run]]] = defaultdict(list)
    for group in places.values():
        labels = group[0].labels
        named[f"{labels['task']} · {_model_name(labels['model'])} · {labels['mode']}"].append(group)
    sections = []
    for title, groups in named.items():
        leaves = [flat(_place(group[0])) for group in groups]
        for group, short, long in zip(groups, told_apart(leaves), what_differs(leaves)):
            more = "" if long == short else long
            sections.append(Section(f"{title} · {short}" if short else title, _entries(group), more))
    return sections


def _model_name(name: str) -> str:
    """Of a folder on this machine its last part; a hub id as it is."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _place(run: Run) -> dict[str, Any]:
    task = {key: value for key, value in run.config["task"].items() if key not in ("seed", "shard", "num_shards")}
    return {"model": run.config["model"], "task": task, "mode": run.config["mode"]}


def _entries(runs: Sequence[Run]) -> tuple[Entry, ...]:
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[config_hash({key: value for key, value in _seen(run).items() if key not in _SEEDS})].append(run)
    by_label: dict[str, list[tuple[Run, ...]]] = defaultdict(list)
    for group in map(_once_a_seed, groups.values()):
        by_label[method_label(group[0].labels)].append(tuple(sorted(group, key=lambda run: run.config["seed"])))
    entries = []
    for label, members in by_label.items():
        words = what_differs([_method_leaves(group[0]) for group in members])
        for group, more in zip(members, words):
            budget, number = _budget(group[0])
            entries.append(Entry(f"{label} ({more})" if more else label, budget, number, group))
    return tuple(
        sorted(entries, key=lambda entry: (entry.budget_value is not None, entry.method, entry.budget_value or 0))
    )


def _seen(run: Run) -> dict[str, Any]:
    """The leaves of a run's configuration that its samples depend on."""
    if run.labels["press"] != "dense":
        return flat(run.config)
    return flat({key: value for key, value in run.config.items() if key not in _OF_PRESSES})


def _once_a_seed(group: Sequence[Run]) -> list[Run]:
    """Of runs of the dense model that a grid over budgets repeated the best one: with the fewest failures, then with the most
    seconds of its own."""
    best: dict[str, Run] = {}
    for run in group:
        key = config_hash({name: value for name, value in flat(run.config).items() if name in _SEEDS})
        if key not in best or _faults(run) < _faults(best[key]):
            best[key] = run
    return list(best.values())


def _faults(run: Run) -> tuple[int, float]:
    reused = run.summary["metrics"].get("dense_reused", {}).get("mean")
    return len(run.summary["failed_samples"]), reused or 0.0


def method_label(labels: Mapping[str, Any]) -> str:
    """`ams tova segment_quota`; `dense`."""
    if labels["press"] == "dense":
        return "dense"
    return " ".join(dict.fromkeys(str(labels[name]) for name in ("press", "scorer", "allocator") if labels.get(name)))


def _method_leaves(run: Run) -> dict[str, Any]:
    """What may set two runs with the same label apart, budgets and seeds aside."""
    return {
        key: value
        for key, value in _seen(run).items()
        if key not in (*_SEEDS, "budget") and not key.startswith(_REPEATED)
    }


def _budget(run: Run) -> tuple[str, float | None]:
    if run.labels["press"] == "dense":
        return "", None
    budget = run.config["budget"]
    if isinstance(budget, str):
        number, unit = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", budget).groups()
        return budget, float(number) * _UNITS[unit.upper()]
    return (f"{budget} tokens" if isinstance(budget, int) else f"{100 * budget:g} %"), float(budget)
