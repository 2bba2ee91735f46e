"""Which of two choices is better on the same samples: differences sample by sample, with their standard error."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstitch.evaluation.records import RunError, config_hash
from kvstitch.evaluation.report.choices import DENSE, PARTS, Rest, choice, rest_of
from kvstitch.evaluation.report.measures import OVER_TOKENS
from kvstitch.evaluation.report.runs import Run
from kvstitch.kernels.common.spelling import did_you_mean

_HOW_MANY = ("num_samples", "shard", "num_shards")
_MOST_TITLES = 3


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


class _Figure(NamedTuple):
    """A metric of one sample, and a hash of all that its run computed."""

    value: float
    outcome: str


@dataclass
class _Figures:
    """A metric by sample: of a choice, and of the dense model beside it."""

    own: dict[tuple, _Figure] = field(default_factory=dict)
    dense: dict[tuple, _Figure] = field(default_factory=dict)


_Table = Mapping[Rest, Mapping[str, _Figures]]


def compare(runs: Sequence[Run], base: str, part: str = "allocator", metric: str = "kl") -> list[Comparison]:
    """Every choice of one part of the method, or every whole method, against `base`, where all the rest is the same.

    A choice is named by its class and by the options that differ from the defaults of the class, e.g.
    `SegmentQuota(credit=False)`; see `choices.choice`. Samples of all tasks and seeds count alike. Among methods the dense
    model is one, too, at every budget: its figures are those that each run has beside its own, so that both are from the
    same samples and, where a metric is a mean over tokens, from the same tokens.

    Args:
        runs: what `find_runs` gives.
        base: name of the choice that the others are compared with.
        part: "allocator", "scorer", "press" (with its own options) or "method", all three together.
        metric: of `predictions.jsonl`.

    Raises:
        RunError: no run with that base, or none with that metric.
    """
    table: dict[Rest, dict[str, _Figures]] = defaultdict(lambda: defaultdict(_Figures))
    names: set[str] = set()
    for run in runs:
        chosen = choice(run, part)
        if chosen is None:
            continue
        names |= {chosen, DENSE} if part == "method" else {chosen}
        if chosen != DENSE:
            _take_in(run, chosen, metric, table[rest_of(run, part)][chosen])
    if base not in names:
        raise RunError(
            f"no run has the {part} {base!r}; there are {', '.join(sorted(names)) or 'none'}{_hint(runs, base, names)}"
        )
    rows = [
        row
        for rest, choices in sorted(table.items())
        for name in sorted({*choices, DENSE} if part == "method" else choices)
        if name != base
        for row in _compared(_titled(rest, table), name, *_pair(choices, base, name))
    ]
    if not rows:
        raise RunError(f"nothing to compare: {_why(runs, base, part, metric, table)}")
    return rows


def left_out(
    runs: Sequence[Run], rows: Sequence[Comparison], base: str, part: str, metric: str
) -> list[tuple[str, list[str]]]:
    """Choices that were run and are in none of the rows, by the reason."""
    names = {chosen for run in runs if (chosen := choice(run, part)) is not None} - {base}
    lacking = sorted(name for name in names if metric not in _metrics(runs, name, part))
    apart = sorted(names - {row.choice for row in rows} - set(lacking))
    tokens = " or compared token" if metric in OVER_TOKENS else ""
    reasons = {f"no sample has {metric!r}": lacking, f"no sample{tokens} in common with {base}": apart}
    return [(reason, found) for reason, found in reasons.items() if found]


def _take_in(run: Run, chosen: str, metric: str, into: _Figures) -> None:
    own, dense = (dict(_values(run, metric, prefix)) for prefix in ("", "dense_"))
    if own.keys() & into.own.keys():
        raise RunError(f"{run.path} holds samples that another run of {chosen} holds, too: leave one of them out")
    into.own |= own
    into.dense |= dense


def _pair(choices: Mapping[str, _Figures], base: str, name: str) -> tuple[Mapping, Mapping]:
    """Figures of the base and of another choice; the dense model's are those beside the other."""
    if base == DENSE:
        return choices[name].dense, choices[name].own
    if base not in choices:
        return {}, {}
    return choices[base].own, choices[base].dense if name == DENSE else choices[name].own


def _titled(rest: Rest, table: _Table) -> str:
    """Its title, with the hash where two rows would read alike."""
    alike = sum(other.title == rest.title for other in table)
    return rest.title if alike == 1 else f"{rest.title} [{rest.digest[:6]}]"


def _why(runs: Sequence[Run], base: str, part: str, metric: str, table: _Table) -> str:
    """What the base, or all of them, lack."""
    known = {name for run in runs for record in run.records for name in record.get("metrics") or {}}
    if metric not in known:
        return f"no sample has {metric!r}{did_you_mean(metric, sorted(known))}"
    has = _metrics(runs, base, part)
    if metric not in has:
        return f"no sample of {base!r} has {metric!r}; it has {', '.join(sorted(has))}"
    here = [_titled(rest, table) for rest, choices in sorted(table.items()) if base in choices]
    there = [_titled(rest, table) for rest, choices in sorted(table.items()) if choices.keys() - {base}]
    where = (
        f"; it was run with {_some(here)}; others with {_some(there)}"
        if here and there and not {*here} & {*there}
        else ""
    )
    tokens = " or compared token" if metric in OVER_TOKENS else ""
    return f"{base!r} shares no sample{tokens} with another {part}{where}"


def _some(titles: Sequence[str]) -> str:
    return " | ".join(titles[:_MOST_TITLES]) + (" | …" if len(titles) > _MOST_TITLES else "")


def _metrics(runs: Sequence[Run], name: str, part: str) -> set[str]:
    """Metrics that any sample of a choice has a number for."""
    prefix = "dense_" if name == DENSE else ""
    return {
        key.removeprefix(prefix)
        for run in runs
        if name in (DENSE, choice(run, part))
        for record in run.records
        for key, value in (record.get("metrics") or {}).items()
        if key.startswith(prefix) and _is_number(value)
    }


def _hint(runs: Sequence[Run], base: str, names: set[str]) -> str:
    """The part that has the name, or the nearest name of this part."""
    for other in PARTS:
        if any(choice(run, other) == base for run in runs):
            return f"; {base!r} is a choice of --part {other}"
    # Users know classes by the names of their configurations, too: global_topk.
    return did_you_mean(base.replace("_", ""), sorted(names))


def _compared(others: str, name: str, base: Mapping, values: Mapping) -> Iterator[Comparison]:
    shared = _once(base, values)
    if shared:
        mine, bases = ([figures[key].value for key in shared] for figures in (values, base))
        differences = [value - other for value, other in zip(mine, bases)]
        error = statistics.stdev(differences) / math.sqrt(len(shared)) if len(shared) > 1 else None
        yield Comparison(
            others,
            name,
            statistics.fmean(bases),
            statistics.fmean(mine),
            statistics.fmean(differences),
            error,
            sum(difference < 0 for difference in differences),
            len(shared),
        )


def _once(base: Mapping, values: Mapping) -> list[tuple]:
    """The samples of both, without those of a further seed with which both runs computed the same again."""
    found: dict[tuple, tuple] = {}
    for key in sorted(base.keys() & values.keys()):
        task, _, *sample = key
        found.setdefault((task, *sample, base[key].outcome, values[key].outcome), key)
    return list(found.values())


def _values(run: Run, metric: str, prefix: str) -> Iterator[tuple[tuple, _Figure]]:
    """The metric of each sample, by task, seed and sample, and by the number of tokens where it is a mean over them.

    These end with the trace, so that as many are the same ones.
    """
    task = config_hash({key: value for key, value in run.config["task"].items() if key not in (*_HOW_MANY, "seed")})
    seeds = config_hash({"seed": run.config["seed"], "task.seed": run.config["task"].get("seed")})
    for record in run.records:
        metrics = record.get("metrics") or {}
        value = metrics.get(prefix + metric)
        if _is_number(value):
            tokens = metrics.get("compared_tokens") if metric in OVER_TOKENS else None
            yield (task, seeds, record["id"], tokens), _Figure(float(value), run.outcome)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
