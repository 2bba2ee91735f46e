"""The part of a run that needs torch: builds what the configuration names and evaluates it."""

from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvstitch.evaluation.environment import recorded_session
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import RunFolder
from kvstitch.evaluation.runner import Evaluation, run_evaluation


def evaluate(plain: Mapping[str, Any], choices: Mapping[str, str], folder: RunFolder) -> dict[str, Any]:
    """Do what the run folder lacks.

    Args:
        plain: the resolved configuration, without what does not change the result.
        choices: name of the chosen option of each group.
        folder: of this run.

    Returns:
        The content of `metrics.json`.
    """
    evaluation = build(plain)
    progress = Progress()
    with folder.opened(OmegaConf.to_yaml(OmegaConf.create(plain), sort_keys=True)):
        progress.note(f"run folder: {folder}")
        try:
            with recorded_session(folder, evaluation.seed):
                labels = describe(plain, choices, evaluation)
                return run_evaluation(evaluation, lambda: instantiate(plain["model"]), folder, labels, progress)
        except KeyboardInterrupt:
            progress.note(f"interrupted: finished samples are kept in {folder}; the same command goes on from there")
            raise


def build(plain: Mapping[str, Any]) -> Evaluation:
    """Everything but the model, so that a wrong value is refused before anything is loaded or written."""
    parts = {name: instantiate(plain[name], _convert_="all") for name in ("press", "task", "sampling")}
    values = {name: plain[name] for name in ("mode", "interval", "speed_tokens", "seed")}
    return Evaluation(**parts, **values)


def describe(plain: Mapping[str, Any], choices: Mapping[str, str], evaluation: Evaluation) -> dict[str, Any]:
    """Names of the parts as the user chose them, for the table and for `metrics.json`."""
    press = evaluation.press
    labels: dict[str, Any] = {name: choices[name] for name in ("press", "task")}
    labels["model"] = plain["model"].get("name", choices["model"])
    labels |= {name: plain[name] for name in ("mode", "interval", "seed", "speed_tokens")}
    if press is None:
        return labels | dict.fromkeys(("scorer", "allocator", "budget", "num_sinks", "num_recent"))
    return labels | {
        "scorer": choices["scorer"],
        "allocator": choices["allocator"],
        "budget": str(press.budget),
        "num_sinks": press.allocator.num_sinks,
        "num_recent": press.allocator.num_recent,
    }
