"""Runs that can be compared stand together: one section a model, task and mode, one entry a method and budget."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from kvstitch.evaluation.records import config_hash
from kvstitch.evaluation.report.budgets import budget_words
from kvstitch.evaluation.report.entries import Entry, Value, share_tokens, which_tokens
from kvstitch.evaluation.report.measures import OVER_TOKENS
from kvstitch.evaluation.report.names import flat, told_apart, what_differs
from kvstitch.evaluation.report.runs import Run

# The press repeats what stands elsewhere in the configuration.
_REPEATED = ("press.scorer.", "press.allocator.", "press.budget", "press.interval", "press._target_")
_SEEDS = ("seed", "task.seed")
# What the dense model never sees.
_OF_PRESSES = ("budget", "decode_tokens", "press", "scorer", "allocator")


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

    def over_same_tokens(self, metric: str) -> list[tuple[str, "Section"]]:
        """This section, or one for each set of tokens that a metric was measured over: only within it does the metric compare.

        Returns:
            Which tokens these are, "" if all pressed entries share them, and the section. An entry of the dense model stands
            only beside entries with its own tokens; elsewhere `dense` has what they have of it.
        """
        if metric not in OVER_TOKENS:
            return [("", self)]
        groups: list[list[Entry]] = []
        for entry in self.pressed:
            if entry.value(metric) is not None:
                fitting = [group for group in groups if all(share_tokens(entry, other) for other in group)]
                fitting[0].append(entry) if fitting else groups.append([entry])
        if not groups:
            return [("", self)]
        alone = [entry for entry in self.entries if entry.budget_value is None]
        found = []
        for group in groups:
            dense = [entry for entry in alone if all(share_tokens(entry, other) for other in group)]
            pressed = group if len(groups) > 1 else self.pressed
            words = which_tokens(group) if len(groups) > 1 else ""
            found.append((words, replace(self, entries=(*dense, *pressed))))
        return found


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
    by_label: dict[str, list[list[Run]]] = defaultdict(list)
    for group in map(_once_a_seed, groups.values()):
        by_label[method_label(group[0].labels)].append(sorted(group, key=lambda run: run.config["seed"]))
    entries = []
    for label, members in by_label.items():
        words = what_differs([_method_leaves(group[0]) for group in members])
        for group, more in zip(members, words):
            budget, number = _budget(group[0])
            entries.append(Entry(f"{label} ({more})" if more else label, budget, number, *_without_repeats(group)))
    return tuple(
        sorted(entries, key=lambda entry: (entry.budget_value is not None, entry.method, entry.budget_value or 0))
    )


def _without_repeats(group: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[tuple[Run, Run], ...]]:
    """Runs of all seeds that computed something of their own, and the others, each with the one that it repeats."""
    first: dict[str, Run] = {}
    repeats = [(run, first[run.outcome]) for run in group if first.setdefault(run.outcome, run) is not run]
    return tuple(first.values()), tuple(repeats)


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
        if key not in best or run.shortcomings < best[key].shortcomings:
            best[key] = run
    return list(best.values())


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
    return budget_words(run.config["budget"])
