"""The part of a run that needs torch: builds what the configuration names and evaluates it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from config_text import config_text
from hydra.utils import instantiate

from kvstitch.evaluation.environment import recorded_session
from kvstitch.evaluation.kvpress_rows import KVPressBaseline
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import RunFolder
from kvstitch.evaluation.runner import Evaluation, run_evaluation
from kvstitch.presses import RetrievalPress


def evaluate(
    plain: Mapping[str, Any],
    choices: Mapping[str, str],
    folder: RunFolder,
    dense_folder: Path | None = None,
    label: str = "",
) -> dict[str, Any]:
    """Do what the run folder lacks.

    Args:
        plain: the resolved configuration, without what does not change the result.
        choices: name of the chosen option of each group, or of the class in its place; see `part_names`.
        folder: of this run.
        dense_folder: see `run_evaluation`.
        label: stands before each line of progress.

    Returns:
        The content of `metrics.json`.
    """
    evaluation = build(plain)
    progress = Progress(label=label)
    with folder.opened(config_text(plain)):
        progress.note(f"run folder: {folder}")
        try:
            with recorded_session(folder, evaluation.seed):
                labels = describe(plain, choices, evaluation)
                load_model = partial(instantiate, plain["model"])
                return run_evaluation(evaluation, load_model, folder, labels, progress, dense_folder)
        except KeyboardInterrupt:
            progress.note(f"interrupted: finished samples are kept in {folder}; the same command goes on from there")
            raise


def build(plain: Mapping[str, Any]) -> Evaluation:
    """Everything but the model, so that a wrong value is refused before anything is loaded or written."""
    task = dict(plain["task"])
    values = {name: task.pop(name) for name in ("shard", "num_shards")}
    values |= {name: plain[name] for name in ("mode", "interval", "decode_tokens", "speed_tokens", "seed")}
    parts = {"press": plain["press"], "task": task, "sampling": plain["sampling"]}
    return Evaluation(**{name: instantiate(part, _convert_="all") for name, part in parts.items()}, **values)


def describe(plain: Mapping[str, Any], choices: Mapping[str, str], evaluation: Evaluation) -> dict[str, Any]:
    """Names of the parts as the user chose them, for the table and for `metrics.json`."""
    press = evaluation.press
    labels: dict[str, Any] = {name: choices[name] for name in ("press", "task")}
    labels["model"] = plain["model"].get("name", choices["model"])
    labels |= {name: plain[name] for name in ("mode", "interval", "seed", "speed_tokens")}
    if isinstance(press, RetrievalPress | KVPressBaseline):
        labels["interval"] = None
    if press is None:
        # Also where another option's `_target_` was put to nothing.
        nothing = dict.fromkeys(("scorer", "allocator", "budget", "num_sinks", "num_recent"))
        return labels | nothing | {"press": "dense"}
    if isinstance(press, KVPressBaseline):
        theirs = {"scorer": press.name, "allocator": None, "num_sinks": None, "num_recent": None}
        return labels | theirs | {"budget": str(press.budget)}
    protecting = press if isinstance(press, RetrievalPress) else press.allocator
    return labels | {
        "scorer": choices["scorer"],
        "allocator": choices["allocator"],
        "budget": str(press.budget),
        "num_sinks": protecting.num_sinks,
        "num_recent": protecting.num_recent,
    }
