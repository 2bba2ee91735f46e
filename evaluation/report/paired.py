"""Which of two choices is better on the same samples: differences sample by sample, with their standard error."""

import difflib
import importlib
import inspect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstitch.evaluation.records import RunError, config_hash
from kvstitch.evaluation.report.runs import Run

PARTS = ("allocator", "scorer", "press")
_HOW_MANY = ("num_samples", "shard", "num_shards")
# Where the samples came from does not tell two rows apart, and where the records lie changes nothing.
_NOT_THE_METHOD = ("task", "seed", "output_dir", "reuse_dense", "speed_tokens", "on_error", "press")


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
    table: dict[str, dict[str, dict[tuple, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        chosen = _choice(run, part)
        if chosen is not None:
            table[_others(run, part)][chosen] |= dict(_values(run, metric))
    names = sorted({name for choices in table.values() for name in choices})
    if base not in names:
        near = difflib.get_close_matches(base, names, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RunError(f"no run has the {part} {base!r}; there are {', '.join(names) or 'none'}{hint}")
    rows = [
        row
        for others, choices in sorted(table.items())
        if base in choices
        for name, values in sorted(choices.items())
        if name != base
        for row in _compared(others, name, choices[base], values)
    ]
    if not rows:
        raise RunError(f"nothing to compare: no sample with {metric!r} under {base!r} and under another {part}")
    return rows


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
        value = record.get("metrics", {}).get(metric)
        if value is not None:
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


def _others(run: Run, part: str) -> str:
    """What two runs must share besides the part: the other parts, budget, interval, mode and model."""
    parts = [run.config.get(name) or run.config["press"].get(name) for name in ("scorer", "allocator") if name != part]
    shown = [named(options) for options in parts if options] + [f"budget {run.config['budget']}"]
    rest = {key: value for key, value in run.config.items() if key not in (*_NOT_THE_METHOD, *PARTS, "budget")}
    return ", ".join([*shown, f"interval {rest.pop('interval', None)}", *_told(rest)])


def _told(rest: Mapping[str, Any]) -> list[str]:
    model = rest.get("model") or {}
    named_model = model.get("name") or str(model.get("_target_", "")).rpartition(".")[2].removeprefix("load_")
    return [str(rest.get("mode")), str(named_model)]
