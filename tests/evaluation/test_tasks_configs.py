"""Every task and model file states every argument, with the default that Python has."""

import inspect
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvstitch.evaluation.tasks import Task

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LEAVES = sorted(f"{group}/{path.stem}" for group in ("model", "task") for path in (CONFIGS / group).glob("*.yaml"))


def load(name):
    """The file as it stands in a run, whose seed generated tasks take over."""
    return OmegaConf.create({"seed": 42, "leaf": OmegaConf.load(CONFIGS / f"{name}.yaml")})["leaf"]


def target(leaf):
    """The class or function, found without calling it."""
    return instantiate({"_target_": "hydra.utils.get_object", "path": leaf["_target_"]})


@pytest.mark.parametrize("name", LEAVES)
def test_file_states_the_defaults(name):
    leaf = load(name)
    stated = {key: "???" if OmegaConf.is_missing(leaf, key) else leaf[key] for key in leaf if key != "_target_"}
    parameters = inspect.signature(target(leaf)).parameters.values()
    required = inspect.Parameter.empty
    assert stated == {p.name: "???" if p.default is required else p.default for p in parameters}
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()[1:]
    assert all("#" in line for line in lines), "each value has its source next to it"


@pytest.mark.parametrize("name", [name for name in LEAVES if name.startswith("task/")])
def test_task_file_makes_a_task(name):
    leaf = load(name)
    missing = {key: "x" for key in leaf if OmegaConf.is_missing(leaf, key)}
    leaf.update(missing)
    assert isinstance(instantiate(leaf), Task)
