"""Turns an exception of a run into one message for the user, or recognises it as a bug that deserves its traceback."""

import dis
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationValidationError, MissingMandatoryValue, OmegaConfBaseException
from option_names import as_written, choice_of, group_of

from kvstitch.evaluation.records import RunError
from kvstitch.kernels.common.spelling import did_you_mean


def explain(
    error: BaseException, configs: Path, arguments: Sequence[str], config_name: str = "run", node: str | None = None
) -> str | None:
    """The message for an error that the user can mend; None for a bug.

    An error is the user's if Hydra or OmegaConf refused the command line, if a file or a disk refused, or if kvstitch
    raised it on purpose; whatever else Python or a library throws is a bug.

    Args:
        error: what the run raised.
        configs: folder of the configuration, to list valid keys.
        arguments: the command line without the script's name.
        config_name: the configuration that the script composes.
        node: where the options stand that the error is about, as far as Hydra knows.
    """
    if isinstance(error, InstantiationException):
        return _instantiation(error, configs, arguments, config_name)
    if isinstance(error, MissingConfigException):
        return _missing_option(error, configs)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the option {error.override!r}; write key=value, and quotes around a value with special signs"
        )
    if isinstance(error, ConfigCompositionException):
        if (group := _key_in(str(error), r"You must specify '(\w+)'")) is not None:
            return f"a {group} must be chosen: add {group}=<choice>, one of {', '.join(_choices(group, configs))}"
        return _composition(error, configs, arguments, config_name)
    if isinstance(error, MissingMandatoryValue):
        key = _key_in(str(error), r"full_key: (\S+)", r"Missing mandatory value: (\S+)")
        return f"{key} must be given: add {key}=<value> to the command"
    if isinstance(error, InterpolationValidationError) and "${output_dir}" in str(error):
        return "output_dir must be text, the name of a folder such as runs; null, lists and mappings are none"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _first_lines(error)
    if isinstance(error, RunError):
        return str(error)
    if config_name == "run" and isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        # Nothing else is refused for what stands there.
        return f"{error.filename} is a file where a folder is needed: move it away, or give another output_dir"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if not _raised_on_purpose(error):
        return None
    place = node or group_of(error)
    return as_written(str(error), place, configs, arguments) if place and config_name == "run" else str(error)


def require_names(arguments: Sequence[str], configs: Path, config_name: str = "run") -> None:
    """Refuse what cannot be the name of an option of a group, such as null or a number; Hydra would not say whose.

    Taking away a group that a run needs (`~scorer`) is refused as well.

    Args:
        arguments: the command line without the script's name.
        configs: folder of the configuration.
        config_name: the configuration that the script composes.

    Raises:
        RunError: one of them.
    """
    stated, groups = _stated(configs, config_name)
    for key in (text[1:].partition("=")[0] for text in arguments if text.startswith("~")):
        if groups.get(key) is not None:
            valid = ", ".join(_choices(key, configs))
            raise RunError(f"~{key} leaves no {key} chosen; name another instead: {key}=<choice>, one of {valid}")
        if key in stated and key not in groups:
            raise RunError(_taken_away(key))
    for override in _overrides_of_groups(arguments, configs):
        group = override.key_or_group
        for value in [] if override.is_delete() else _values(override):
            # Two experiments can go together, two presses cannot.
            names = value if isinstance(value, list) and groups.get(group) is None else [value]
            if not all(isinstance(name, str | QuotedString) for name in names):
                raise RunError(_no_option(group, json.dumps(value, default=str), configs))


def require_keys(plain: Mapping[str, Any], configs: Path, config_name: str = "run") -> None:
    """Refuse what was added to a configuration and nobody reads, or taken away although somebody does.

    Args:
        plain: the resolved configuration.
        configs: folder of the configuration.
        config_name: the configuration that the script composes.

    Raises:
        RunError: one of them.
    """
    stated, groups = _stated(configs, config_name)
    parts = {group for group, option in groups.items() if option is not None}
    for key in plain:
        if key not in stated and key not in parts:
            raise RunError(
                _nothing_chosen(key) if key in groups else _no_key(key, "valid keys are", {*stated, *groups})
            )
    for part in parts:
        if isinstance(plain.get(part), Mapping) and "_target_" not in plain[part]:
            raise RunError(_nothing_chosen(part))
    _require_stated(stated, plain)


def _require_stated(stated: Mapping[str, Any], plain: Mapping[str, Any], parent: str = "") -> None:
    for key, value in stated.items():
        if key not in plain:
            raise RunError(_taken_away(f"{parent}{key}"))
        if isinstance(value, Mapping):
            if not isinstance(plain[key], Mapping):
                raise RunError(f"{key} is no option but holds some: {', '.join(map(str, value))}; got {plain[key]!r}")
            _require_stated(value, plain[key], f"{key}.")


def _missing_option(error: MissingConfigException, configs: Path) -> str:
    group, slash, option = (error.missing_cfg_file or "").partition("/")
    if not slash or not (configs / group).is_dir():
        return _first_lines(error)
    return _no_option(group, option, configs)


def _no_option(group: str, option: str, configs: Path) -> str:
    valid = _choices(group, configs)
    # Rows of one table share a folder, which says enough where nobody could read all of them.
    shown = dict.fromkeys(name if "/" not in name else f"{name.partition('/')[0]}/..." for name in valid)
    return f"there is no {group}={option}; choose one of {', '.join(shown) or 'none'}{did_you_mean(option, valid)}"


def _choices(group: str, configs: Path) -> list[str]:
    folder = configs / group
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def _no_key(key: str, place: str, valid: Iterable[str]) -> str:
    valid = sorted(valid)
    return f"there is no option {key}; {place} {', '.join(valid)}{did_you_mean(key.rpartition('.')[2], valid)}"


def _taken_away(key: str) -> str:
    return f"{key} was taken away, but it is needed: give it a value instead"


def _nothing_chosen(group: str) -> str:
    return f"no {group} is chosen here, so it has no options; add {group}=<choice>"


def _composition(error: ConfigCompositionException, configs: Path, arguments: Sequence[str], config_name: str) -> str:
    # The first names what was written, its cause the part of it that does not exist.
    message = f"{error}\n{error.__cause__}"
    if message.startswith("Ambiguous value"):
        return f"{message.splitlines()[0]}; add -m to run each of them"
    key = _key_in(message, r"full_key: (\S+)", r"Could not override '([^']+)'")
    if key is None or "not in struct" not in message:
        return _first_lines(error)
    parent = key.rpartition(".")[0]
    if key in _groups(configs):
        return _nothing_chosen(key)
    config = _groups_alone(configs, arguments, config_name)
    node = OmegaConf.select(config, parent) if parent else config
    valid = sorted(str(name) for name in node if name != "_target_") if isinstance(node, DictConfig) else []
    if not valid:
        return f"there is no option {key}: {parent} has nothing to set"
    return _no_key(key, f"{parent} takes" if parent else "valid keys are", valid)


def _groups_alone(configs: Path, arguments: Sequence[str], config_name: str) -> DictConfig:
    """The configuration with the chosen options of the groups, but without single values."""
    # Of a sweep over options the first stands for all.
    chosen = [
        f"{o.key_or_group}={next(o.sweep_string_iterator())}" if o.is_sweep_override() else o.input_line
        for o in _overrides_of_groups(arguments, configs)
    ]
    with initialize_config_dir(str(configs), version_base="1.3"):
        # The list may name null groups, which a user can still choose.
        config = compose(config_name, overrides=chosen)
    return OmegaConf.merge(dict.fromkeys(_stated(configs, config_name)[1]), config)


def _stated(configs: Path, config_name: str) -> tuple[dict[str, Any], dict[str, str | None]]:
    """What the file of a configuration holds itself, and the groups that it lists with their defaults."""
    content = OmegaConf.to_container(OmegaConf.load(configs / f"{config_name}.yaml"), resolve=False)
    content.pop("hydra", None)
    listed = [entry for entry in content.pop("defaults") if isinstance(entry, Mapping)]
    groups = _groups(configs)
    return content, {name: option for entry in listed for name, option in entry.items() if name in groups}


def _overrides_of_groups(arguments: Sequence[str], configs: Path) -> list[Override]:
    groups = _groups(configs)
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    return [o for o in OverridesParser.create().parse_overrides(overrides) if o.key_or_group in groups]


def _values(override: Override) -> list[Any]:
    """What stands behind the sign of equality, of a sweep each of its values; none if only Hydra can list them."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return value.list
    return [] if override.is_sweep_override() else [value]


def _groups(configs: Path) -> set[str]:
    return {path.name for path in configs.iterdir() if path.is_dir()}


def _instantiation(
    error: InstantiationException, configs: Path, arguments: Sequence[str], config_name: str
) -> str | None:
    cause = error.__cause__
    if cause is None:
        return _first_lines(error)
    if isinstance(cause, TypeError) and "argument" in str(cause) and not _raised_on_purpose(cause):
        return _unexpected_argument(error, cause, configs, arguments) or str(cause)
    if isinstance(cause, ImportError):
        return f"{_first_lines(error)}: {cause}"
    node = _key_in(str(error), r"full_key: ((?:scorer|allocator)[\w.]*)")
    return explain(cause, configs, arguments, config_name, node)


def _unexpected_argument(
    error: InstantiationException, cause: TypeError, configs: Path, arguments: Sequence[str]
) -> str | None:
    key = _key_in(str(cause), r"unexpected keyword argument '(\w+)'")
    target = _key_in(str(error), r"call to target '([\w.]+)'")
    if key is None or target is None:
        return None
    made = get_object(target)
    # What is called from there can refuse arguments, too, and they are no options.
    if not str(cause).startswith(made.__qualname__):
        return None
    valid, choice = inspect.signature(made).parameters, choice_of(target, configs, arguments)
    node = _key_in(str(error), r"full_key: (\S+)") or (choice[0] if choice else None)
    # What stands inside another part is no choice of its own.
    taker = made.__name__ if choice is None or "." in node else "=".join(choice)
    return _no_key(f"{node}.{key}" if node else key, f"{taker} takes", valid)


def _raised_on_purpose(error: BaseException) -> bool:
    """Whether the innermost frame is a `raise` statement in a module of kvstitch, or of Hydra, which checks the rest."""
    trace = error.__traceback__
    if trace is None or isinstance(error, AssertionError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    module = trace.tb_frame.f_globals.get("__name__", "")
    return raised and module.startswith(("kvstitch.", "hydra."))


def _key_in(message: str, *patterns: str) -> str | None:
    matches = (re.search(pattern, message) for pattern in patterns)
    return next((match[1] for match in matches if match), None)


def _first_lines(error: BaseException) -> str:
    """What a library says, without its advice and its listing of the search path."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [
        line for line in lines if line and not line.startswith(("full_key", "object_type", "See https", "To append"))
    ]
    return ": ".join(kept[:2])
