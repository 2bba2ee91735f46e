"""Every experiment's own sweep can be composed and built, and its header says how it is run here and what the paper found."""

import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate

from kvstitch.presses import EvictionPress, RetrievalPress

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SWEEPS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def header(name):
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("#")]


@pytest.mark.parametrize("name", SWEEPS)
def test_first_and_last_job_of_a_sweep_are_built(name):
    asked = header(name)[1].split()[3:]
    assert header(name)[1].startswith("python scripts/run.py -m ") and asked[0] == f"experiment={name}"
    assert "arXiv" in "".join(header(name))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        params = compose("run", overrides=asked, return_hydra_config=True).hydra.sweeper.params
        overrides = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
        values = [
            list(override.sweep_string_iterator()) if override.is_sweep_override() else [str(override.value())]
            for override in overrides
        ]
        # Small enough for a machine without a GPU.
        assert 2 <= math.prod(map(len, values)) <= 36
        keys = [override.key_or_group for override in overrides]
        assert all((CONFIGS / key / f"{text}.yaml").exists() for key, each in zip(keys, values) for text in each
                   if (CONFIGS / key).is_dir())  # fmt: skip
        built = []
        for place in (0, -1):
            config = compose("run", overrides=[*asked, *(f"{key}={each[place]}" for key, each in zip(keys, values))])
            built.append(instantiate(config.press, _convert_="all"))
            task = {key: value for key, value in config.task.items() if key not in ("shard", "num_shards")}
            instantiate(task, _convert_="all")
    assert all(isinstance(press, EvictionPress | RetrievalPress) for press in built)
    assert built[0] != built[1] or config.task.get("kind") is not None
