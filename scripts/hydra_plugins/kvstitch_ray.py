"""`hydra/launcher=ray`: the jobs of a sweep as tasks of a Ray cluster, a running one or one started on this machine."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from sweep import SweepFolder, Untold


class RayLauncher(Launcher):
    """Submits every job at once; Ray queues them by the resources that each asks for.

    A job whose process died, as often as `max_retries` says, is noted as lost; the others go on.

    Args:
        init: keyword arguments of `ray.init`; `address` names a running cluster, null starts one here.
        remote: resources of a job, keyword arguments of `ray.remote`.
    """

    def __init__(self, init: DictConfig, remote: DictConfig):
        self._init = OmegaConf.to_container(init, resolve=True)
        self._remote = OmegaConf.to_container(remote, resolve=True)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # Here, so that everybody else does not need Ray.
        try:
            import ray
        except ImportError as error:
            raise ImportError("hydra/launcher=ray needs Ray: pip install -e '.[ray]'") from error

        setup_globals()
        ours = not ray.is_initialized()
        if ours:
            handler = signal.getsignal(signal.SIGTERM)
            ray.init(**self._init)
            # Ray's own would exit on the spot, without a word of what became of the jobs.
            signal.signal(signal.SIGTERM, handler)
        try:
            remote = ray.remote(**self._remote)(_run) if self._remote else ray.remote(_run)
            state = Singleton.get_state()
            jobs = {
                remote.remote(self._context, self._job_config(overrides, number), self._function, state): number
                for number, overrides in enumerate(job_overrides, start=initial_job_idx)
            }
            return self._collect(jobs)
        finally:
            if ours:
                ray.shutdown()

    def _collect(self, jobs: Mapping[Any, int]) -> list[JobReturn]:
        """What became of each job, in their order, once all have come to an end.

        Raises:
            RayError: of the first that could not be run at all, such as for a package that a worker lacks.
        """
        import ray

        sweep = SweepFolder(Path(self._config.hydra.sweep.dir))
        waiting, returns, errors = dict(jobs), {}, []
        while waiting:
            # As they end: with on_error=stop the next one asks who is lost.
            (ended,), _ = ray.wait(list(waiting))
            number = waiting.pop(ended)
            try:
                returns[number] = ray.get(ended)
            except ray.exceptions.RayTaskError as error:
                errors.append(error)
            except ray.exceptions.RayError as error:
                untold = sweep.lose(number, f"its process died ({_first_line(error)})")
                if untold is not None:
                    returns[number] = _bearing(untold)
        if errors:
            raise errors[0]
        return [returns[number] for number in sorted(returns)]

    def _job_config(self, overrides: Sequence[str], number: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        return config


def _bearing(untold: Untold) -> JobReturn:
    """What a job that died would have returned, had it lived to say what the disk does not take."""
    job = JobReturn()
    job.status, job.return_value = JobStatus.COMPLETED, untold
    return job


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _run(context: HydraContext, config: DictConfig, function: TaskFunction, state: Any) -> JobReturn:
    """In the worker: Hydra's singletons as in the process that launched, then the job."""
    setup_globals()
    Singleton.set_state(state)
    HydraConfig.instance().set_config(config)
    return run_job(
        hydra_context=context,
        task_function=function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
