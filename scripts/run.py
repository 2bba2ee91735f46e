"""Evaluate one way to compress a KV cache on one task, next to the dense model on the same samples.

    python scripts/run.py press=ams scorer=tova budget=256
    python scripts/run.py --help

The same command resumes an interrupted run and shows a finished one.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra_errors import explain
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvstitch.evaluation.records import METRICS, RunError, RunFolder, folder_name
from kvstitch.evaluation.table import print_table

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def run(config: DictConfig) -> None:
    """One run, from the composed configuration to the table."""
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    choices = dict(HydraConfig.get().runtime.choices)
    _require_parts(plain)
    # Where a run is written does not change what it is.
    output_dir = Path(plain.pop("output_dir"))
    folder = RunFolder(output_dir / folder_name(readable(plain, choices), plain))
    metrics = folder.read_json(METRICS)
    if metrics is None:
        # Here and not above: torch and transformers take seconds, which a typo or a finished run should not cost.
        from run_job import evaluate

        metrics = evaluate(plain, choices, folder)
    else:
        print("this run is finished already; its results:", file=sys.stderr)
    _draw(folder)
    print_table(metrics, Console())
    print(f"run folder: {folder}")
    if metrics["failed_samples"]:
        raise RunError(f"{len(metrics['failed_samples'])} of {metrics['num_samples']} samples failed, see {folder}")


def readable(plain: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    """What the run folder's name says about the run."""
    names = [choices["task"], choices["press"]]
    return names if choices["press"] == "dense" else [*names, choices.get("scorer") or "", str(plain["budget"])]


def _require_parts(plain: Mapping[str, Any]) -> None:
    for group in ("model", "task", "press"):
        if not plain.get(group):
            valid = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
            raise RunError(f"a run needs a {group}: add {group}=<choice>, one of {', '.join(valid)}")


def _draw(folder: RunFolder) -> None:
    """The plot of kept positions, unless it is there already or nothing was evicted."""
    from kvstitch.evaluation.plots import KEPT_POSITIONS, can_plot, plot_kept_positions

    source = folder.path / KEPT_POSITIONS
    target = source.with_suffix(".png")
    if not source.exists() or target.exists():
        return
    if can_plot():
        plot_kept_positions(source, target)
    else:
        print(f"{target.name} is not drawn: it needs matplotlib, pip install 'kvstitch[plots]'", file=sys.stderr)


def guarded(action: Callable[[], None], config_name: str = "run") -> int:
    """Exit status of an action: 0 done, 1 refused or failed. An error of the user's gets one message, a bug its traceback."""
    try:
        action()
    except Exception as error:
        message = explain(error, CONFIGS, sys.argv[1:], config_name)
        if message is None or os.environ.get("KVSTITCH_TRACEBACK") == "1":
            traceback.print_exception(error)
        if message is not None:
            print(f"error: {message}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Exit status: 0 done, 1 refused or failed, 130 interrupted."""
    # Hydra would print its own account of an exception and exit; it reads this when one comes.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    statuses: list[int] = []

    # Errors are dealt with inside the job, so that those of one job of a sweep do not keep the others from running.
    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="run")
    def job(config: DictConfig) -> None:
        statuses.append(guarded(lambda: run(config)))

    try:
        return max([guarded(job), *statuses])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
