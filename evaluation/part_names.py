"""What the parts of a run are called: by the file that was chosen, or by the class if another was put in its place."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_GROUPS = ("model", "task", "press", "scorer", "allocator")
_OURS = "kvstitch."


def part_names(choices: Mapping[str, Any], plain: Mapping[str, Any], folders: Iterable[Path]) -> dict[str, Any]:
    """The chosen options of all groups, with the class in place of an option whose `_target_` was overridden.

    `scorer=tova scorer._target_=mine.ValueNorm` is no TOVA, so that no file, table or report must call it so.

    Args:
        choices: name of the chosen option of each group.
        plain: the resolved configuration.
        folders: where options are looked for, in this order.
    """
    folders = list(folders)
    names = dict(choices)
    for group in _GROUPS:
        part, option = plain.get(group), choices.get(group)
        if not isinstance(part, Mapping) or not option or "_target_" not in part:
            continue
        stated = _stated_target(group, str(option), folders)
        if stated is not None and stated != part["_target_"]:
            names[group] = class_name(str(part["_target_"]))
    return names


def class_name(target: str) -> str:
    """`SegmentQuota` or `CommunityRetrieval.paper` of ours, `mine.ValueNorm` of anybody else's module."""
    if not target.startswith(_OURS):
        return target
    parts = target.split(".")
    first = next((place for place, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[first:])


def _stated_target(group: str, option: str, folders: list[Path]) -> str | None:
    """What the file of an option makes; None if that cannot be told from files."""
    path = next((path for folder in folders if (path := folder / group / f"{option}.yaml").is_file()), None)
    if path is None:
        return None
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(content, Mapping):
        return None
    target = content.get("_target_")
    if target is not None:
        return None if "${" in str(target) else str(target)
    # An option of somebody's own that changes values of another one.
    based_on = [entry for entry in content.get("defaults") or () if isinstance(entry, str) and entry != "_self_"]
    return _stated_target(group, based_on[-1], folders) if based_on and based_on[-1] != option else None
