"""Turns an exception of a run into one message for the user, or recognises it as a bug that deserves its traceback."""

import difflib
import dis
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvstitch.evaluation.records import RunError


def explain(error: BaseException, configs: Path, arguments: Sequence[str], config_name: str = "run") -> str | None:
    """The message for an error that the user can mend; None for a bug.

    An error is the user's if Hydra or OmegaConf refused the command line, if a file or a disk refused, or if kvstitch
    raised it on purpose; whatever else Python or a library throws is a bug.

    Args:
        error: what the run raised.
        configs: folder of the configuration, to list valid keys.
        arguments: the command line without the script's name.
        config_name: the configuration that the script composes.
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
        return _composition(error, configs, arguments, config_name)
    if isinstance(error, MissingMandatoryValue):
        key = _key_in(str(error), r"full_key: (\S+)", r"Missing mandatory value: (\S+)")
        return f"{key} must be given: add {key}=<value> to the command"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _first_lines(error)
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return str(error) if _raised_on_purpose(error) else None


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """`; did you mean 'ams'?`, or nothing if no choice is near."""
    near = difflib.get_close_matches(wrong, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _missing_option(error: MissingConfigException, configs: Path) -> str:
    group, _, option = (error.missing_cfg_file or "").partition("/")
    folder = configs / group
    if not folder.is_dir() or not option:
        return _first_lines(error)
    valid = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return f"there is no {group}={option}; choose one of {', '.join(valid) or 'none'}{nearest(option, valid)}"


def _composition(error: ConfigCompositionException, configs: Path, arguments: Sequence[str], config_name: str) -> str:
    # The first names what was written, its cause the part of it that does not exist.
    message = f"{error}\n{error.__cause__}"
    if message.startswith("Ambiguous value"):
        return f"{message.splitlines()[0]}; add -m to run each of them"
    key = _key_in(message, r"full_key: (\S+)", r"Could not override '([^']+)'")
    if key is None or "not in struct" not in message:
        return _first_lines(error)
    parent, _, leaf = key.rpartition(".")
    if key in _groups(configs):
        return f"no {key} is chosen here, so it has no options; add {key}=<choice>"
    config = _groups_alone(configs, arguments, config_name)
    node = OmegaConf.select(config, parent) if parent else config
    valid = sorted(str(name) for name in node if name != "_target_") if isinstance(node, DictConfig) else []
    if not valid:
        return f"there is no option {key}: {parent} has nothing to set"
    place = f"{parent} takes" if parent else "valid keys are"
    return f"there is no option {key}; {place} {', '.join(valid)}{nearest(leaf, valid)}"


def _groups_alone(configs: Path, arguments: Sequence[str], config_name: str) -> DictConfig:
    """The configuration with the chosen options of the groups, but without single values."""
    groups = _groups(configs)
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    parsed = [o for o in OverridesParser.create().parse_overrides(overrides) if o.key_or_group in groups]
    # Of a sweep over options the first stands for all.
    chosen = [
        f"{o.key_or_group}={next(o.sweep_string_iterator())}" if o.is_sweep_override() else o.input_line for o in parsed
    ]
    with initialize_config_dir(str(configs), version_base="1.3"):
        # The list may name null groups, which a user can still choose.
        config = compose(config_name, overrides=chosen)
    listed = OmegaConf.load(configs / f"{config_name}.yaml").defaults
    named = {str(name) for entry in listed if isinstance(entry, DictConfig) for name in entry}
    return OmegaConf.merge({name: None for name in groups & named}, config)


def _groups(configs: Path) -> set[str]:
    return {path.name for path in configs.iterdir() if path.is_dir()}


def _instantiation(
    error: InstantiationException, configs: Path, arguments: Sequence[str], config_name: str
) -> str | None:
    cause = error.__cause__
    if cause is None:
        return _first_lines(error)
    if isinstance(cause, TypeError) and "argument" in str(cause) and not _raised_on_purpose(cause):
        return str(cause)
    if isinstance(cause, ImportError):
        return f"{_first_lines(error)}: {cause}"
    return explain(cause, configs, arguments, config_name)


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
