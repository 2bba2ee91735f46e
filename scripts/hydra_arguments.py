"""Mends what Hydra does not do in command lines: globs into folders, values that belong to a choice, options of any class."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import OmegaConf

from kvstitch.evaluation.records import RunError
from kvstitch.kernels.common.spelling import did_you_mean


def prepare(arguments: Sequence[str], configs: Path) -> list[str]:
    """The command line as Hydra can take it; preparing it twice changes nothing.

    Args:
        arguments: the command line without the script's name.
        configs: folder of the configuration.

    Raises:
        RunError: a glob matches nothing, or the folder of a sweep is swept over.
    """
    arguments = allow_any_option(expand_globs(arguments, configs), configs)
    if not {"-m", "--multirun"} & set(arguments):
        return arguments
    require_one_folder(arguments)
    return leave_values_to_jobs(arguments, configs)


def require_one_folder(arguments: Sequence[str]) -> None:
    """Raises:
    RunError: jobs would leave their states in several folders, and the sweep as a whole would not find them.
    """
    for text in arguments:
        if text.startswith("output_dir=") and OverridesParser.create().parse_overrides([text])[0].is_sweep_override():
            raise RunError(
                f"output_dir is where a sweep as a whole is written, and cannot be swept over: got {text}; give the command once "
                "for each folder"
            )


def allow_any_option(arguments: Sequence[str], configs: Path) -> list[str]:
    """The command line with `++` before options that no file can list, because they are those of a class that a user chooses.

    In `scorer=kvpress scorer.press._target_=kvpress.SnapKVPress scorer.press.window_size=16` Hydra would ask for a `+` before
    the last. Options are taken as they are of a node whose `_target_` the command line gives, that a file leaves empty, or
    whose class is none of ours; what its class does not take is refused when it is made.
    """
    keys = [text.partition("=")[0] for text in arguments if _is_override(text)]
    chosen = {key.rpartition(".")[0] for key in keys if key.endswith("._target_")}
    groups = {key.partition(".")[0] for key in keys if key.count(".") > 1} - {"hydra"}
    nodes = {node.lstrip("+") for node in chosen}.union(*(_nodes_of_any_class(group, configs) for group in groups))

    def is_free(key: str) -> bool:
        plain = re.fullmatch(r"\w+(\.\w+)+", key) is not None and not key.endswith("._target_")
        return plain and any(key.startswith(f"{node}.") for node in nodes)

    return [f"++{text}" if _is_override(text) and is_free(text.partition("=")[0]) else text for text in arguments]


def _nodes_of_any_class(group: str, configs: Path) -> set[str]:
    """Mappings in the files of a group that are empty, or are made by a class from elsewhere."""
    files = (configs / group).rglob("*.yaml")
    return {node for file in files for node in _open_nodes(OmegaConf.to_container(OmegaConf.load(file)), group)}


def _open_nodes(content: Mapping[str, Any], parent: str) -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            node = f"{parent}.{name}"
            if not value or not str(value.get("_target_", "kvstitch.")).startswith("kvstitch."):
                yield node
            yield from _open_nodes(value, node)


def leave_values_to_jobs(arguments: Sequence[str], configs: Path) -> list[str]:
    """Of a sweep over options of a group, every other value inside a group as a sweep of one.

    Before the jobs Hydra composes what they have in common, without what is swept over. In
    `experiment=community_ablation/full,community_ablation/fine task.path=book.txt` that is the default task, which has no
    path. What is itself a sweep is left to the jobs. Values outside of groups stay: the sweep as a whole reads `output_dir`.
    """
    parsed = {text: OverridesParser.create().parse_overrides([text])[0] for text in arguments if _is_override(text)}
    groups = {path.name for path in configs.iterdir() if path.is_dir()}
    if not any(override.is_sweep_override() and override.key_or_group in groups for override in parsed.values()):
        return list(arguments)

    def is_plain(text: str) -> bool:
        override = parsed.get(text)
        if override is None or override.is_sweep_override() or override.is_delete():
            return False
        group, dot, _ = override.key_or_group.partition(".")
        return bool(dot) and group in groups - {"hydra"} and text.partition("=")[2] != ""

    return ["{}=choice({})".format(*text.split("=", 1)) if is_plain(text) else text for text in arguments]


def _is_override(text: str) -> bool:
    return "=" in text and not text.startswith("-")


def expand_globs(arguments: Sequence[str], configs: Path) -> list[str]:
    """The command line with every glob over a group replaced by the options that it matches, as a sweep.

    As for files, `*` does not reach into folders: `experiment=glob(*)` is what Hydra takes it for, and
    `experiment=glob(ams_ablation/*)` the rows of that table.

    Args:
        arguments: the command line without the script's name.
        configs: folder of the configuration.

    Raises:
        RunError: nothing matches.
    """
    return [_expanded(text, configs) if "=glob(" in text.replace(" ", "") else text for text in arguments]


def _expanded(argument: str, configs: Path) -> str:
    (override,) = OverridesParser.create().parse_overrides([argument])
    pattern, folder = override.value(), configs / override.key_or_group
    if not isinstance(pattern, Glob) or not folder.is_dir():
        return argument
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    depths = {text.count("/") for text in pattern.include}
    chosen = pattern.filter([name for name in names if name.count("/") in depths])
    if not chosen:
        valid = sorted({f"{name.rpartition('/')[0]}/*" if "/" in name else "*" for name in names})
        near = did_you_mean(pattern.include[0], valid)
        raise RunError(
            f"{argument} matches no {override.key_or_group}; those that match some: {', '.join(valid)}{near}"
        )
    return f"{override.input_line.partition('=')[0]}={','.join(chosen)}"
