"""Evaluate one way to compress a KV cache on one task, next to the dense model on the same samples.

    python scripts/run.py press=ams scorer=tova budget=256
    python scripts/run.py -m press=ams,topk scorer=tova,keydiff budget=64,128,256
    python scripts/run.py --help

The same command resumes an interrupted run or sweep and shows a finished one.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from broken_pipe import until_the_reader_leaves
from config_text import config_text
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from hydra_arguments import prepare
from hydra_choices import require_fitting_allocator, require_one_press, tell_unused_launcher
from hydra_errors import explain, require_keys, require_names
from hydra_plugins.kvstitch_ray import RayLauncher
from hydra_plugins.kvstitch_sweeper import TableSweeper
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from sweep import DONE, FAILED, ON_ERROR, READ, RUNNING, SweepFolder, Untold, tell_run_folder
from termination import STATUS, Terminated, sigterm_interrupts
from warning_lines import plain_warnings

from kvstitch.evaluation.options import check_choice, check_type
from kvstitch.evaluation.paper_reading import read_tables
from kvstitch.evaluation.paper_records import record_tables
from kvstitch.evaluation.paper_tables import PaperTable
from kvstitch.evaluation.part_names import part_names
from kvstitch.evaluation.records import METRICS, FolderInUse, RunError, RunFolder, folder_name
from kvstitch.evaluation.table import print_table

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DENSE = ".dense"


class Job(NamedTuple):
    """One run that was asked for: its resolved configuration, the names of its parts, where it is written, where what the
    dense model gave is shared with other runs, and what a paper states beside it."""

    plain: dict[str, Any]
    choices: dict[str, str]
    folder: RunFolder
    dense_folder: Path | None
    papers: tuple[PaperTable, ...]


def compose_job(config: DictConfig) -> Job:
    """What a composed configuration asks for.

    Raises:
        RunError: a part is missing, two of them contradict each other, or there is a key that nobody reads.
        TypeError: `output_dir` is no text, `reuse_dense` no truth value, or something in `paper` of the wrong kind.
        ValueError: `on_error` is none of its choices, or `paper` holds what nobody reads.
    """
    raw = OmegaConf.to_container(config, resolve=False)
    _require_parts(raw)
    require_keys(raw, CONFIGS)
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    chosen, folders = HydraConfig.get().runtime.choices, _config_folders()
    require_one_press(chosen, folders)
    choices = part_names(chosen, plain, folders)
    require_fitting_allocator(choices, plain, CONFIGS)
    # Where a run is written, what follows its failure, who computed the dense side and what a paper states beside it do not
    # change what it is.
    output_dir, on_error, reuse_dense, paper = (
        plain.pop(name) for name in ("output_dir", "on_error", "reuse_dense", "paper")
    )
    check_type("output_dir", output_dir, str)
    check_choice("on_error", on_error, ON_ERROR)
    check_type("reuse_dense", reuse_dense, bool)
    papers = read_tables(paper)
    output_dir = Path(output_dir)
    if output_dir == Path():
        raise RunError("output_dir must name a folder of its own, such as runs, not the present one")
    folder = RunFolder(output_dir / folder_name(readable(plain, choices), plain))
    return Job(plain, choices, folder, output_dir / DENSE if reuse_dense else None, papers)


def run(job: Job, label: str = "") -> dict[str, Any]:
    """Do what the run folder lacks; returns the content of `metrics.json`.

    Args:
        job: what to do.
        label: stands before each line of progress.

    Raises:
        RunError: samples failed; the others are evaluated and recorded.
    """
    metrics = job.folder.read_json(METRICS)
    if metrics is not None:
        job.folder.require_config(config_text(job.plain))
    else:
        if "torch" not in sys.modules:
            print(f"{label}loading PyTorch and transformers", file=sys.stderr, flush=True)
        # Here and not above: they take seconds, on a busy machine a minute, which a typo or a finished run should not cost.
        from run_job import evaluate

        with plain_warnings(CONFIGS):
            metrics = evaluate(job.plain, job.choices, job.folder, job.dense_folder, label)
    # Of a run that was finished before, too: its figures may have come since.
    record_tables(job.folder, job.papers)
    _draw(job.folder)
    return metrics


def single(config: DictConfig) -> None:
    """One run, from the composed configuration to the table."""
    tell_unused_launcher(HydraConfig.get().runtime.choices)
    job = compose_job(config)
    if (job.folder.path / METRICS).exists():
        print("this run is finished already; its results:", file=sys.stderr)
    try:
        metrics = run(job)
    except Exception as error:
        _keep_error(job.folder, error)
        raise
    print_table(metrics, Console())
    print(f"run folder: {job.folder}")
    try:
        _require_measured(metrics, job.folder)
    except RunError as error:
        _keep_error(job.folder, error)
        raise
    job.folder.clear_error()


def _keep_error(folder: RunFolder, error: Exception) -> None:
    """Say in the run's folder why it did not finish, if anything stands there that the same command would go on from."""
    if isinstance(error, FolderInUse) or not folder.path.exists():
        return
    reason = explain(error, CONFIGS, sys.argv[1:]) or f"{type(error).__name__}: {error}"
    # A disk that is full must not hide what went wrong.
    with suppress(RunError):
        folder.write_error(f"{reason}\n\n{_full_story(error)}")


def one_of_sweep(config: DictConfig) -> Untold | None:
    """One job of a sweep, perhaps in a process of its own; how it went goes into a file, never up to the launcher.

    Returns:
        What the disk did not take of that, for the process that launched.
    """
    hydra_config = HydraConfig.get()
    # Workers of a cluster start elsewhere; what is shared is the file system.
    os.chdir(hydra_config.runtime.cwd)
    sweep, number = SweepFolder(Path(hydra_config.sweep.dir)), hydra_config.job.num
    if config.on_error == "stop" and sweep.any_failed():
        return sweep.leave_out(number)
    job = folder = reason = None
    try:
        sweep.write(number, RUNNING)
        job = compose_job(config)
        folder = str(job.folder)
        sweep.write(number, RUNNING, folder)
        state = READ if (job.folder.path / METRICS).exists() else DONE
        _require_measured(run(job, f"job {number}: " if _runs_beside_others(hydra_config) else ""), job.folder)
        job.folder.clear_error()
    except KeyboardInterrupt:
        raise
    # Also who calls sys.exit somewhere below, or raises what is no Exception: that would end the sweep, and its other jobs
    # with it.
    except BaseException as error:
        if _interrupted(error):
            raise KeyboardInterrupt from error
        state = FAILED
        reason = explain(error, CONFIGS, list(hydra_config.overrides.task)) or f"{type(error).__name__}: {error}"
        if job is not None and not isinstance(error, FolderInUse):
            reason += tell_run_folder(job.folder, f"{reason}\n\n{_full_story(error)}")
        print(f"job {number} failed: {reason}", file=sys.stderr)
    return sweep.tell(number, state, folder, reason)


def _interrupted(error: BaseException) -> bool:
    """Whether an error came while a library tidied up after Ctrl-C, as OmegaConf's do."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _runs_beside_others(hydra_config: DictConfig) -> bool:
    """Whether other jobs may write their lines to the same terminal. On SLURM each has files of its own."""
    launcher = hydra_config.runtime.choices["hydra/launcher"]
    return launcher in ("joblib", "ray") and hydra_config.launcher.get("n_jobs") != 1


def readable(plain: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    """What the run folder's name says about the run."""
    names = [choices["task"], choices["press"]]
    if choices["press"] == "dense":
        return names
    part = choices.get("scorer") or choices.get("allocator") or plain["press"].get("name", "")
    return [*names, part, str(plain["budget"])]


def _config_folders() -> list[Path]:
    """Where Hydra looks for options, `--config-dir` included."""
    sources = HydraConfig.get().runtime.config_sources
    return [Path(source.path) for source in sources if source.schema == "file"]


def _require_parts(plain: Mapping[str, Any]) -> None:
    for group in ("model", "task", "press"):
        # What every task has in common is there without a task, too.
        if "_target_" not in (plain.get(group) or {}):
            valid = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
            raise RunError(f"a run needs a {group}: add {group}=<choice>, one of {', '.join(valid)}")


def _require_measured(metrics: Mapping[str, Any], folder: RunFolder) -> None:
    failed = metrics["failed_samples"]
    if failed:
        raise RunError(f"{len(failed)} of {metrics['num_samples']} samples failed ({', '.join(failed)}), see {folder}")


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
        print(f"{target.name} is not drawn: it needs matplotlib, pip install -e '.[plots]'", file=sys.stderr)


def _full_story(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def guarded(action: Callable[[], None], config_name: str = "run") -> int:
    """Exit status of an action: 0 done, 1 refused or failed. An error of the user's gets one message, a bug its traceback."""
    try:
        sys.argv[1:] = prepare(sys.argv[1:], CONFIGS)
        require_names(sys.argv[1:], CONFIGS, config_name)
        action()
    except BrokenPipeError:
        raise
    except Exception as error:
        message = explain(error, CONFIGS, sys.argv[1:], config_name)
        if message is None or os.environ.get("KVSTITCH_TRACEBACK") == "1":
            traceback.print_exception(error)
        if message is not None:
            print(f"error: {message}", file=sys.stderr)
        return 1
    return 0


def _prepare_workers() -> None:
    """Processes that a launcher starts find the modules beside this one; Hydra finds its plugins among them."""
    here = str(Path(__file__).resolve().parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *paths])
    for plugin in (TableSweeper, RayLauncher):
        Plugins.instance().register(plugin)
    OmegaConf.register_new_resolver("groups_of_run", _groups_of_run, replace=True)


def _groups_of_run() -> str:
    """For the help; Hydra would list what another script takes, too."""
    names: dict[str, list[str]] = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        group = path.parent.relative_to(CONFIGS).as_posix()
        if group.partition("/")[0] not in (".", "bench", "hydra"):
            names.setdefault(group, []).append(path.stem)
    return "".join(f"{group}: {', '.join(options)}\n" for group, options in sorted(names.items()))


def main() -> int:
    """Exit status: 0 done, 1 refused or failed, 130 interrupted, 143 ended by SIGTERM."""
    # Hydra would print its own account of an exception and exit; it reads this when one comes.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _prepare_workers()
    statuses: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="run")
    def job(config: DictConfig) -> Untold | None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return one_of_sweep(config)
        statuses.append(guarded(lambda: single(config)))
        return None

    try:
        with sigterm_interrupts():
            return max([guarded(job), *statuses])
    except Terminated:
        return STATUS
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
