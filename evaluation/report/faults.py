"""What a report takes for granted in a finished run's files, checked in one place: each can be read and still lack it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstitch.evaluation.records import CONFIG, METRICS, PREDICTIONS, RUN_META
from kvstitch.evaluation.report.budgets import budget_words

_NUMBER = int | float
_WORDS = {Mapping: "a mapping", Sequence: "a list", str: "text", int: "a whole number", _NUMBER: "a number"}
# Name and kind of what must be there; what is None counts as not there.
_IN_CONFIG = {"model": Mapping, "task": Mapping, "press": Mapping, "mode": str, "seed": int}
_IN_METRICS = {"run": Mapping, "num_samples": int, "failed_samples": Mapping, "metrics": Mapping}
_IN_RUN = {"press": str, "task": str, "model": str, "mode": str}
_IN_META = {"sessions": Sequence}
# What may be left out, but not be something else.
_MAY_BE_IN_TASK = {"shard": int, "num_shards": int}
_MAY_BE_IN_METRICS = {"skipped_records": Sequence}


def fault(
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
) -> str | None:
    """The first thing that is missing or of another kind, by file and name; None if all is there."""
    return next(_faults(config, metrics, records, meta), None)


def _faults(
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
) -> Iterator[str]:
    """One by one: whoever takes only the first never looks into what was found to be missing."""
    yield from _lacks(CONFIG, config, _IN_CONFIG)
    yield from _lacks(CONFIG, config["task"], _present(config["task"], _MAY_BE_IN_TASK), "task.")
    yield from _lacks(METRICS, metrics, _IN_METRICS | _present(metrics, _MAY_BE_IN_METRICS))
    yield from _lacks(METRICS, metrics["run"], _IN_RUN, "run.")
    yield from _lacks(METRICS, metrics["metrics"], dict.fromkeys(metrics["metrics"], Mapping), "metrics.")
    yield from _lacks(RUN_META, meta, _IN_META)
    if metrics["run"]["press"] != "dense":
        yield from _of_budget(config)
    if len(records) != metrics["num_samples"]:
        yield f"{PREDICTIONS} holds {len(records)} of the {metrics['num_samples']} samples that {METRICS} counts"
    for record in records:
        yield from _of_record(record)


def _present(content: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kind for name, kind in wanted.items() if name in content}


def _lacks(where: str, content: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    missing = [prefix + name for name in wanted if content.get(name) is None]
    if missing:
        yield f"{where} has no {', '.join(missing)}"
    for name, kind in wanted.items():
        if not _is(content[name], kind):
            yield f"{where}: {prefix}{name} must be {_WORDS[kind]}, got {content[name]!r:.40}"


def _is(value: Any, kind: Any) -> bool:
    # Text is a sequence, too, and True a whole number, but neither is meant.
    but = {Sequence: str, int: bool}.get(kind, ())
    return isinstance(value, kind) and not isinstance(value, but)


def _of_budget(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("budget") is None:
        yield f"{CONFIG} has no budget"
    try:
        budget_words(config["budget"])
    except ValueError as error:
        yield f"{CONFIG}: {error}"


def _of_record(record: Mapping[str, Any]) -> Iterator[str]:
    if "error" in record:
        return
    where = f"sample {record['id']!r} of {PREDICTIONS}"
    if "metrics" not in record:
        yield f"{where} has neither metrics nor an error"
    yield from _lacks(where, record, {"metrics": Mapping} | _present(record, {"answers": Sequence}))
    known = {name: _NUMBER for name, value in record["metrics"].items() if value is not None}
    yield from _lacks(where, record["metrics"], known, "metrics.")
    for place, answer in enumerate(record.get("answers", ())):
        if not isinstance(answer, Mapping):
            yield f"{where}: answers[{place}] must be a mapping, got {answer!r:.40}"
        # Where needles lie is among the facts of both.
        yield from _lacks(where, record, {"meta": Mapping, "context_tokens": int})
        sides = _present(answer, {"pressed": Mapping, "dense": Mapping})
        yield from _lacks(where, answer, {"meta": Mapping} | sides, f"answers[{place}].")
        for side in sides:
            yield from _lacks(where, answer[side], {"score": _NUMBER}, f"answers[{place}].{side}.")
