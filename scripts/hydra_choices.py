"""Choices of a command line that Hydra takes without a word although they contradict each other, or do nothing."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvstitch.evaluation.records import RunError

# The evicting and the retrieving one.
_PRESSES = ("kvstitch.presses.EvictionPress", "kvstitch.presses.retrieval.RetrievalPress")


def require_one_press(choices: Mapping[str, str | None], folders: Sequence[Path]) -> None:
    """Refuse a press beside a method that has another one: half of the method would be left.

    Args:
        choices: the chosen option of each group.
        folders: where Hydra looks for options.

    Raises:
        RunError: names both.
    """
    method, press = choices.get("method"), choices.get("press")
    own = None if method is None else _press_of(method, folders)
    if own is not None and own != press:
        raise RunError(
            f"method={method} is press={own} with a scorer and an allocator of its own, and press={press} is asked for "
            f"beside it: give one of them. Parts of a method are changed one by one, as in method={method} scorer=<choice>"
        )


def require_fitting_allocator(choices: Mapping[str, str | None], plain: Mapping[str, Any], configs: Path) -> None:
    """Refuse an allocator that evicts where a press retrieves, and the other way round. Parts of others are theirs to check.

    Args:
        choices: names of the parts, see `part_names`.
        plain: the resolved configuration.
        configs: folder of the configuration.

    Raises:
        RunError: names both, and the options that fit.
    """
    press, allocator = (str((plain.get(part) or {}).get("_target_", "")) for part in ("press", "allocator"))
    if press not in _PRESSES or not allocator.startswith("kvstitch.allocators."):
        return
    retrieves = press == _PRESSES[1]
    if _retrieves(allocator) == retrieves:
        return
    files = sorted((configs / "allocator").glob("*.yaml"))
    fitting = [file.stem for file in files if _retrieves(OmegaConf.load(file)["_target_"]) == retrieves]
    why = "evicts and does not retrieve" if retrieves else "retrieves and evicts nothing"
    raise RunError(
        f"allocator={choices['allocator']} {why}; press={choices['press']} takes allocator={'|'.join(fitting)}"
    )


def _retrieves(target: str) -> bool:
    return target.startswith("kvstitch.allocators.retrieval.")


def _press_of(method: str, folders: Sequence[Path]) -> str | None:
    """The press that a method's file chooses; None if it chooses none."""
    files = [folder / "method" / f"{method}.yaml" for folder in folders]
    content = next((OmegaConf.to_container(OmegaConf.load(file)) for file in files if file.exists()), {})
    entries = [entry for entry in content.get("defaults", ()) if isinstance(entry, Mapping)]
    return next((entry["override /press"] for entry in entries if "override /press" in entry), None)


def tell_unused_launcher(choices: Mapping[str, str | None]) -> None:
    """A single run is done by this process, whatever launcher was chosen."""
    launcher = choices.get("hydra/launcher")
    if launcher != "basic":
        print(
            f"warning: hydra/launcher={launcher} is not used: it launches the jobs of a sweep, add -m", file=sys.stderr
        )
