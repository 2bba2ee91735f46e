"""The YAMLs of retrieving allocators state every argument, with Python's value and its source."""

import inspect
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

import kvstitch.configs
from kvstitch.allocators import retrieval

FOLDER = Path(kvstitch.configs.__file__).parent / "allocator"
# The presets that a leaf stands for.
LEAVES = {
    "community": retrieval.CommunityRetrieval.recommended(),
    "community_paper": retrieval.CommunityRetrieval.paper(),
    "pages": retrieval.PageRetrieval(),
    "clusters": retrieval.ClusterRetrieval(),
    "window_retrieval": retrieval.WindowRetrieval(),
    "oracle": retrieval.OracleRetrieval(),
    "graph_eviction": retrieval.GraphEviction(),
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_yaml_and_python_agree(leaf):
    config = OmegaConf.load(FOLDER / f"{leaf}.yaml")
    assert instantiate(config) == LEAVES[leaf]
    parameters = inspect.signature(get_class(config._target_)).parameters
    assert set(config) - {"_target_"} == set(parameters)
    for name in parameters:
        value = getattr(LEAVES[leaf], name)
        assert config[name] == value and isinstance(config[name], bool) == isinstance(value, bool), name


def test_every_retrieving_allocator_has_a_leaf():
    covered = {type(allocator) for allocator in LEAVES.values()}
    exported = {getattr(retrieval, name) for name in retrieval.__all__}
    kinds = {x for x in exported if isinstance(x, type) and issubclass(x, retrieval.RetrievingAllocator)}
    assert covered == kinds - {retrieval.RetrievingAllocator}
