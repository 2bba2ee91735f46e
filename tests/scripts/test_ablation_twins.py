"""Rows of CommunityKV's ablation differ in what they are about, and in nothing else; runs and bench have the same."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

import kvstitch.configs

CONFIGS = Path(kvstitch.configs.__file__).parent
ROWS = sorted(path.stem for path in (CONFIGS / "experiment" / "community_ablation").glob("*.yaml"))


def composed(name):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("run", overrides=[f"experiment=community_ablation/{name}", "task.path=a.txt"])
        return OmegaConf.to_container(config)


def test_the_refresh_has_a_partner_of_the_same_length():
    with_refresh, without = composed("refresh_512"), composed("refresh_never")
    assert with_refresh["allocator"].pop("refresh") == 512 and without["allocator"].pop("refresh") is None
    assert with_refresh == without and without["decode_tokens"] is None


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("refresh")])
def test_a_run_has_the_methods_of_the_bench(name):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        bench = compose("bench", overrides=["bench=community_ablation", "bench.model=null"]).bench
    assert instantiate(composed(name)["allocator"]) == instantiate(bench.methods[name])
