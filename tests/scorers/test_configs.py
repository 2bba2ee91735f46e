"""Every YAML of the scorer group states every argument, with the value that Python has by default."""

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

import kvstitch.configs
from kvstitch import scorers

FOLDER = Path(kvstitch.configs.__file__).parent / "scorer"
LEAVES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# Leaves that are there in order to differ from the defaults, and in what.
PRESETS = {"expected_e2": {"epsilon": 0.01}}


def load(leaf):
    return OmegaConf.load(FOLDER / f"{leaf}.yaml")


@pytest.mark.parametrize("leaf", LEAVES)
def test_yaml_states_the_defaults_of_python(leaf):
    config = load(leaf)
    if leaf == "kvpress" and find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")
    parameters = inspect.signature(get_class(config._target_)).parameters
    stated = {key: value for key, value in config.items() if key != "_target_"}
    assert set(stated) == set(parameters)
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            expected = PRESETS.get(leaf, {}).get(name, parameter.default)
            assert stated[name] == expected and type(stated[name]) is type(expected), name


@pytest.mark.parametrize("leaf", LEAVES)
def test_yaml_makes_a_scorer(leaf):
    if leaf == "kvpress" and find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")
    scorer = instantiate(load(leaf))
    assert isinstance(scorer, scorers.Scorer)
    if leaf != "kvpress":
        assert scorer == type(scorer)(**PRESETS.get(leaf, {}))


def test_every_scorer_has_a_leaf():
    covered = {load(leaf)._target_.rsplit(".", 1)[1] for leaf in LEAVES}
    exported = {
        name for name in scorers.__all__ if issubclass(getattr(scorers, name), scorers.Scorer) and name != "Scorer"
    }
    assert covered == exported


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_value_has_its_source(leaf):
    for line in (FOLDER / f"{leaf}.yaml").read_text().splitlines():
        key = line.split(":")[0].strip()
        if line.startswith("#") or key in ("press", "_target_"):
            continue
        assert "#" in line, f"{leaf}.yaml: {key} has no source"
