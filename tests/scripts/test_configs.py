"""YAML and Python agree, and every leaf can be overridden without a plus sign."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from kvstitch.allocators import CommunityRetrieval, HeadAdaptive, SegmentQuota
from kvstitch.evaluation.generate import Sampling
from kvstitch.presses import EvictionPress, RetrievalPress

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = {
    "segment_quota_paper": SegmentQuota.paper,
    "segment_quota_reference": SegmentQuota.reference,
    "community_paper": CommunityRetrieval.paper,
    "head_adaptive_mask": partial(HeadAdaptive, mode="mask"),
}
ALLOCATORS = sorted(path.stem for path in (CONFIGS / "allocator").glob("*.yaml"))
EXPERIMENTS = sorted(
    str(path.relative_to(CONFIGS / "experiment").with_suffix("")) for path in (CONFIGS / "experiment").rglob("*.yaml")
)
# Not for the command line: the evaluation reads the events itself.
NOT_IN_YAML = {"record_events", "on_event"}


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("run", overrides=list(overrides))


def field_names(kind):
    return {field.name for field in dataclasses.fields(kind) if field.init}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_allocator_files_state_every_default(name):
    leaf = OmegaConf.load(CONFIGS / "allocator" / f"{name}.yaml")
    kind = get_class(leaf["_target_"])
    assert set(leaf) - {"_target_"} == field_names(kind)
    assert instantiate(leaf, _convert_="all") == PRESETS.get(name, kind)()


def test_sampling_states_every_default():
    leaf = OmegaConf.load(CONFIGS / "run.yaml")["sampling"]
    assert set(leaf) - {"_target_"} == field_names(Sampling) and instantiate(leaf) == Sampling()


@pytest.mark.parametrize("name, allocator", [("ams", "SegmentQuota"), ("topk", "GlobalTopK")])
def test_a_press_chooses_companions_that_any_override_replaces(name, allocator):
    config = composed(f"press={name}")
    assert set(config.press) - {"_target_"} == field_names(EvictionPress) - NOT_IN_YAML
    press = instantiate(config.press, _convert_="all")
    assert (type(press.scorer).__name__, type(press.allocator).__name__) == ("TOVA", allocator)
    assert press.interval == config.interval and press.budget.tokens == config.budget
    assert not press.compress_prompt and press.record_events
    other = ("scorer=keydiff", "allocator=fixed_segments", "budget=0.5", "interval=7", "allocator.num_sinks=2")
    for overrides in ((f"press={name}", *other), (*other, f"press={name}")):
        press = instantiate(composed(*overrides).press, _convert_="all")
        assert (type(press.scorer).__name__, type(press.allocator).__name__) == ("KeyDiff", "FixedSegments")
        assert press.budget.fraction == 0.5 and press.interval == 7 and press.allocator.num_sinks == 2


def test_dense_needs_neither_scorer_nor_allocator():
    config = composed("press=dense")
    assert "scorer" not in config and "allocator" not in config and instantiate(config.press) is None


def test_the_smoke_run_composes_with_any_task():
    config = composed("debug=smoke", "task=text", "task.path=x", "budget=99")
    assert config.task.num_samples == 1 and config.interval == 64 and config.budget == 99


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_compose_and_give_way_to_the_command_line(name):
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    # What an experiment does not bring, such as the path of a book, follows on the line.
    assert re.search(rf"^# python scripts/run\.py (-m )?experiment={name}( .+)?$", text, re.MULTILINE)
    press = instantiate(composed(f"experiment={name}").press, _convert_="all")
    assert isinstance(press, EvictionPress | RetrievalPress)
    if isinstance(press, RetrievalPress):
        config = composed(f"experiment={name}", "allocator=pages", "budget=99")
        assert config.budget == 99 and config.press.allocator["_target_"].endswith("PageRetrieval")
        return
    config = composed(f"experiment={name}", "scorer=keydiff", "budget=99")
    assert config.budget == 99 and config.press.scorer["_target_"].endswith("KeyDiff")
