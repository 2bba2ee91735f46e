"""Messages of the library name options and classes as Python has them; here they become what stands on a command line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

# Folders of the library whose options a group of the same name holds.
_GROUPS = {"presses": "press", "scorers": "scorer", "allocators": "allocator"}


def group_of(error: BaseException) -> str | None:
    """The group whose code raised an error; None if it was none of them."""
    found, trace = None, error.__traceback__
    while trace is not None:
        found = group_of_module(trace.tb_frame.f_globals.get("__name__", "")) or found
        trace = trace.tb_next
    return found


def group_of_module(name: str) -> str | None:
    """The group that a module belongs to; None if it belongs to none."""
    package, _, rest = name.partition(".")
    return _GROUPS.get(rest.partition(".")[0]) if package == "kvstitch" else None


def as_written(message: str, node: str, configs: Path, arguments: Sequence[str] = ()) -> str:
    """A message about a part of a run, with whole names: `num_recent` of a press is `press.num_recent`.

    A word that is no name alone, such as share, is taken for one at the beginning and before a sign of equality only.

    Args:
        message: of the library.
        node: place of the part's options, e.g. "scorer" or "allocator.allocator".
        configs: folder of the configuration.
        arguments: the command line, which says which of several options of the same class was meant.
    """
    group = node.partition(".")[0]
    # Of a press, whose messages also speak of its allocator.
    message = re.sub(r"the allocator's `(\w+)`", r"`allocator.\1`", message)
    for name in sorted(_options(configs, group), key=len, reverse=True):
        anywhere = rf"|(?<![\w.`']){name}(?![\w(.])" if "_" in name else ""
        message = re.sub(rf"`{name}`|^{name}(?= )|(?<![\w.`']){name}(?==){anywhere}", rf"<{node}>\g<0>", message)
    message = re.sub(rf"<{re.escape(node)}>(`?)", rf"\g<1>{node}.", message)
    for kind in ("scorer", "allocator"):
        for target in {content["_target_"] for _, content in _files(configs, kind)}:
            pattern = rf"(^|\b(?:take|use) ){target.rpartition('.')[2]}(?= )"
            message = re.sub(pattern, rf"\g<1>{'='.join(choice_of(target, configs, arguments))}", message)
    return message


def choice_of(target: str, configs: Path, arguments: Sequence[str] = ()) -> tuple[str, str] | None:
    """Group and option that make something of a class; of several that which the command line names, or else the first."""
    found = [
        (group, option)
        for group in ("press", "scorer", "allocator", "task", "model")
        for option, content in _files(configs, group)
        # Hydra's messages name the module that a class stands in, not the package that files name.
        if str(content.get("_target_")).rpartition(".")[2] == target.rpartition(".")[2]
    ]
    return next((pair for pair in found if "=".join(pair) in arguments), found[0] if found else None)


def _options(configs: Path, group: str) -> set[str]:
    """What the files of a group hold themselves; what they take over from elsewhere has another name on a command line."""
    values = (pair for _, content in _files(configs, group) for pair in content.items())
    return {name for name, value in values if name not in ("_target_", "defaults") and not str(value).startswith("${")}


@lru_cache
def _content(path: Path) -> Mapping[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def _files(configs: Path, group: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((path.stem, _content(path)) for path in sorted((configs / group).glob("*.yaml")))
