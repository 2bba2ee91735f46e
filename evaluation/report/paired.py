"""Which of two choices is better on the same samples: differences sample by sample, with their standard error."""

import difflib
import importlib
import inspect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstitch.evaluation.records import RunError, config_hash
from kvstitch.evaluation.report.runs import Run

PARTS = ("allocator", "scorer", "press")
_HOW_MANY = ("num_samples", "shard", "num_shards")
# Where the samples came from does not tell two rows apart, and where the records lie changes nothing.
_NOT_THE_METHOD = ("task", "seed", "output_dir", "reuse_dense", "speed_tokens", "on_error")


@dataclass(frozen=True)
class Comparison:
    """One choice against the base, on the samples that both have.

    Args:
        others: what both share, e.g. `TOVA, 256`.
        choice: the row's name.
        base: mean of the base over those samples.
        mean: mean of the choice.
        difference: mean of (choice - base) over the samples.
        error: standard error of that mean; None for a single sample.
        lower: samples on which the choice is lower than the base.
        n: samples.
    """

    others: str
    choice: str
    base: float
    mean: float
    difference: float
    error: float | None
    lower: int
    n: int


def compare(runs: Sequence[Run], base: str, part: str = "allocator", metric: str = "kl") -> list[Comparison]:
    """Every choice of one part of the method against `base`, where all the rest is the same.

    A choice is named by its class and by the options that differ from the defaults of the class, e.g.
    `SegmentQuota(credit=False)`. Samples of all tasks and seeds count alike.

    Args:
        runs: what `find_runs` gives.
        base: name of the choice that the others are compared with.
        part: "allocator", "scorer" or "press" (with all its options, of which scorer and allocator are left out).
        metric: of `predictions.jsonl`.

    Raises:
        RunError: no run with that base, or none with that metric.
    """
    table: dict[_Rest, dict[str, dict[tuple, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        chosen = _choice(run, part)
        if chosen is None:
            continue
        values, known = dict(_values(run, metric)), table[_others(run, part)][chosen]
        if values.keys() & known.keys():
            raise RunError(f"{run.path} holds samples that another run of {chosen} holds, too: leave one of them out")
        known |= values
    names = sorted({name for choices in table.values() for name in choices})
    if base not in names:
        raise RunError(
            f"no run has the {part} {base!r}; there are {', '.join(names) or 'none'}{_hint(runs, base, names)}"
        )
    rows = [
        row
        for others, choices in sorted(table.items())
        if base in choices
        for name, values in sorted(choices.items())
        if name != base
        for row in _compared(_titled(others, table), name, choices[base], values)
    ]
    if not rows:
        raise RunError(f"nothing to compare: {_why(runs, metric) or f'{base!r} shares no sample with another {part}'}")
    return rows


def _titled(rest: "_Rest", table: Mapping["_Rest", object]) -> str:
    """Its title, with the hash where two rows would read alike."""
    alike = sum(other.title == rest.title for other in table)
    return rest.title if alike == 1 else f"{rest.title} [{rest.digest[:6]}]"


def _why(runs: Sequence[Run], metric: str) -> str | None:
    """Says that no record has the metric, and which one is near."""
    known = {name for run in runs for record in run.records for name in record.get("metrics") or {}}
    if metric in known:
        return None
    near = difflib.get_close_matches(metric, sorted(known), n=1, cutoff=0.3)
    return f"no sample has {metric!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _hint(runs: Sequence[Run], base: str, names: Sequence[str]) -> str:
    """The nearest name of this part, or the part that has the name."""
    for other in PARTS:
        found = {chosen for run in runs if (chosen := _choice(run, other)) is not None}
        if base in found - set(names):
            return f"; {base!r} is a choice of --part {other}"
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(base.lower().replace("_", ""), lower, n=1, cutoff=0.3)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def _compared(others: str, name: str, base: Mapping, values: Mapping) -> Iterator[Comparison]:
    shared = sorted(base.keys() & values.keys())
    if shared:
        differences = [values[key] - base[key] for key in shared]
        error = statistics.stdev(differences) / math.sqrt(len(shared)) if len(shared) > 1 else None
        yield Comparison(
            others,
            name,
            statistics.fmean(base[key] for key in shared),
            statistics.fmean(values[key] for key in shared),
            statistics.fmean(differences),
            error,
            sum(difference < 0 for difference in differences),
            len(shared),
        )


def _values(run: Run, metric: str) -> Iterator[tuple[tuple, float]]:
    """The metric of each sample, by task, seed and sample."""
    drawn = {key: value for key, value in run.config["task"].items() if key not in _HOW_MANY}
    task = config_hash(drawn | {"seed": run.config["seed"]})
    for record in run.records:
        value = (record.get("metrics") or {}).get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            yield (task, record["id"]), float(value)


def _choice(run: Run, part: str) -> str | None:
    options = run.config.get(part) or run.config["press"].get(part)
    if options is None:
        return None
    return named({name: value for name, value in options.items() if name not in PARTS and name != "budget"})


def named(options: Mapping[str, Any]) -> str:
    """`SegmentQuota(credit=False)`: the class, and what differs from its defaults."""
    target = str(options["_target_"])
    path, _, name = target.rpartition(".")
    defaults = _defaults(path, name)
    changed = [
        f"{key}={value}"
        for key, value in sorted(options.items())
        if key != "_target_" and not (key in defaults and defaults[key] == value)
    ]
    return f"{name}({', '.join(changed)})" if changed else name


def _defaults(path: str, name: str) -> dict[str, Any]:
    """Of a class; none for one that this installation does not have, whose options are then all shown."""
    try:
        made = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError):
        return {}
    return {key: item.default for key, item in inspect.signature(made).parameters.items()}


def _others(run: Run, part: str) -> "_Rest":
    """What two runs must share besides the part: all that can change a figure."""
    parts = [run.config.get(name) or run.config["press"].get(name) for name in ("scorer", "allocator") if name != part]
    shown = [] if part == "press" else [named(options) for options in parts if options]
    rest = {key: value for key, value in run.config.items() if key not in (*_NOT_THE_METHOD, *PARTS)}
    if part != "press":
        rest["press"] = _own(run.config["press"])
    title = [*shown, f"budget {run.config['budget']}", f"interval {run.config.get('interval')}", *_told(run.config)]
    return _Rest(", ".join(title), config_hash({"shown": shown, "rest": rest}))


def _own(press: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the press itself, without its parts."""
    return {key: value for key, value in press.items() if key not in (*PARTS, "budget")}


class _Rest(NamedTuple):
    """What a row shares with the base, for readers, and a hash of all of it."""

    title: str
    digest: str


def _told(config: Mapping[str, Any]) -> list[str]:
    model = config.get("model") or {}
    model_name = model.get("name") or str(model.get("_target_", "")).rpartition(".")[2].removeprefix("load_")
    return [str(config.get("mode")), str(model_name)]
