"""What runs are compared by: the name of one part of a method, or of the whole, and all the rest that must be the same."""

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstitch.evaluation.part_names import class_name
from kvstitch.evaluation.records import config_hash
from kvstitch.evaluation.report.runs import Run

# "method" is all of the others together.
PARTS = ("allocator", "scorer", "press", "method")
DENSE = "dense"
_KEYS = ("allocator", "scorer", "press")
# Where the samples came from does not tell two rows apart, and where the records lie changes nothing.
_NOT_THE_METHOD = ("task", "seed", "output_dir", "reuse_dense", "speed_tokens", "on_error")


class Rest(NamedTuple):
    """What a row shares with the base, for readers, and a hash of all of it."""

    title: str
    digest: str


def choice(run: Run, part: str) -> str | None:
    """What a run has for a part, e.g. `SegmentQuota(credit=False)`, `KVPressBaseline(name=SnapKVPress)` or, as a method,
    `EvictionPress + TOVA + SegmentQuota`; "dense" is the method without a press.

    None if the run has no such part. A press without scorer and allocator is a choice among methods only: there is nothing
    that it could share with another press.
    """
    if part == "method":
        if run.labels["press"] == DENSE:
            return DENSE
        return " + ".join(map(named, (_own(run), *_parts(run).values())))
    if part == "press":
        return named(_own(run)) if _parts(run) else None
    options = _parts(run).get(part)
    return None if options is None else named(options)


def rest_of(run: Run, part: str) -> Rest:
    """What two runs must share besides the part: all that can change a figure."""
    shown = [] if part == "method" else [named(options) for name, options in _parts(run).items() if name != part]
    rest = {key: value for key, value in run.config.items() if key not in (*_NOT_THE_METHOD, *_KEYS)}
    if part in ("allocator", "scorer"):
        rest["press"] = _own(run)
    title = [*shown, f"budget {run.config['budget']}", f"interval {run.config.get('interval')}", *_told(run.config)]
    return Rest(", ".join(title), config_hash({"shown": shown, "rest": rest}))


def named(options: Mapping[str, Any]) -> str:
    """`SegmentQuota(credit=False)`: the class, and what differs from its defaults."""
    path, _, name = str(options["_target_"]).rpartition(".")
    defaults = _defaults(path, name)
    changed = [
        f"{key}={_value(value)}"
        for key, value in sorted(options.items())
        if key != "_target_" and not (key in defaults and _is_default(value, defaults[key]))
    ]
    # Somebody else's with its module: two of one name are two choices.
    shown = class_name(str(options["_target_"]))
    return f"{shown}({', '.join(changed)})" if changed else shown


def _value(value: Any) -> str:
    return named(value) if isinstance(value, Mapping) and "_target_" in value else str(value)


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, Mapping) and "_target_" in value:
        # A part of a part, such as the allocator that spends what a pyramid gives to each layer.
        return _value(value) == type(default).__name__ and default == type(default)()
    return default == value


def _defaults(path: str, name: str) -> dict[str, Any]:
    """Of a class; none for one that this installation does not have, whose options are then all shown."""
    try:
        made = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError):
        return {}
    defaults = {key: item.default for key, item in inspect.signature(made).parameters.items()}
    fields = dataclasses.fields(made) if dataclasses.is_dataclass(made) else ()
    return defaults | {
        field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING
    }


def _parts(run: Run) -> dict[str, Mapping[str, Any]]:
    """Options of scorer and allocator, as far as the run has them."""
    found = {name: run.config.get(name) or run.config["press"].get(name) for name in ("scorer", "allocator")}
    return {name: options for name, options in found.items() if options}


def _own(run: Run) -> dict[str, Any]:
    """Options of the press itself, without its parts and without what is said for the run as a whole."""
    return {key: value for key, value in run.config["press"].items() if key not in (*_KEYS, "budget", "interval")}


def _told(config: Mapping[str, Any]) -> list[str]:
    model = config.get("model") or {}
    model_name = model.get("name") or str(model.get("_target_", "")).rpartition(".")[2].removeprefix("load_")
    return [str(config.get("mode")), str(model_name)]
