"""`hydra/launcher=ray`: the jobs of a sweep as tasks of a Ray cluster, a running one or one started on this machine."""

from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class RayLauncher(Launcher):
    """Submits every job at once; Ray queues them by the resources that each asks for.

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
            ray.init(**self._init)
        try:
            remote = ray.remote(**self._remote)(_run) if self._remote else ray.remote(_run)
            state = Singleton.get_state()
            jobs = [
                remote.remote(
                    self._context, self._job_config(overrides, initial_job_idx + index), self._function, state
                )
                for index, overrides in enumerate(job_overrides)
            ]
            return ray.get(jobs)
        finally:
            if ours:
                ray.shutdown()

    def _job_config(self, overrides: Sequence[str], number: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        return config


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
