"""Options of a class that a user chooses need no `+`, and a name that the class does not know gets one message."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CONFIGS = SCRIPTS.parent / "configs"
SNAP_KV = ("scorer=kvpress", "scorer.press._target_=kvpress.SnapKVPress")
needs_kvpress = pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")


@pytest.fixture
def prepare(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from hydra_arguments import prepare

    return lambda *arguments: prepare(arguments, CONFIGS)


def configurations(directory="runs"):
    return [yaml.safe_load(path.read_text()) for path in sorted(Path(directory).glob("*/config.yaml"))]


@needs_kvpress
def test_arguments_of_a_press_of_kvpress(script, tiny_arguments):
    outcome = script("run", *tiny_arguments, *SNAP_KV, "scorer.press.window_size=16")
    assert outcome.status == 0, outcome.err
    (config,) = configurations()
    assert config["scorer"]["press"] == {"_target_": "kvpress.SnapKVPress", "window_size": 16}
    again = script("run", *tiny_arguments, *SNAP_KV, "+scorer.press.window_size=16")
    assert again.status == 0 and "finished already" in again.err


@needs_kvpress
def test_they_can_be_swept_over(script, tiny_arguments):
    outcome = script("run", "-m", *tiny_arguments, *SNAP_KV, "scorer.press.window_size=8,16", "task.num_samples=1")
    assert outcome.status == 0, outcome.err
    assert {config["scorer"]["press"]["window_size"] for config in configurations()} == {8, 16}


@needs_kvpress
def test_arguments_of_a_row_of_kvpress(script, tiny_arguments):
    arguments = [text for text in tiny_arguments if not text.startswith("allocator.")]
    named = ["press=kvpress", "press.name=SnapKVPress", "press.options.window_size=8"]
    outcome = script("run", *arguments, *named)
    assert outcome.status == 0, outcome.err
    assert configurations()[0]["press"]["options"] == {"window_size": 8}


def test_options_of_an_allocator_inside_another(script, tiny_arguments):
    inner = "allocator.allocator"
    arguments = [text for text in tiny_arguments if not text.startswith("allocator.")]
    chosen = ["allocator=pyramid", f"{inner}._target_=kvstitch.allocators.SegmentQuota"]
    options = [f"{inner}.num_recent=8", f"{inner}.min_segment_tokens=4"]
    outcome = script("run", *arguments, *chosen, *options)
    assert outcome.status == 0, outcome.err
    assert configurations()[0]["allocator"]["allocator"]["min_segment_tokens"] == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(
            [*SNAP_KV, "scorer.press.windw_size=16"],
            "there is no option scorer.press.windw_size; SnapKVPress takes compression_ratio, kernel_size, window_size; did you mean",
            marks=needs_kvpress,
        ),
        pytest.param(
            ["scorer=kvpress", "scorer.press.window_size=16"],
            "there is no option scorer.press.window_size; KnormPress takes compression_ratio",
            marks=needs_kvpress,
        ),
        pytest.param(
            ["press=kvpress", "press.name=KnormPress", "press.options.window_size=16"],
            "press.name=KnormPress with press.options={'window_size': 16}",
            marks=needs_kvpress,
        ),
        (["press=dense", "scorer.press.window_size=16"], "no scorer is chosen here, so it has no options"),
        (["allocator.segmnt_mass=0.1"], "there is no option allocator.segmnt_mass; allocator takes batch,"),
        (["allocator=pyramid", "allocator.allocator.window=3"], "there is no option allocator.allocator.window;"),
    ],
)
def test_names_that_nobody_knows_get_one_message(script, arguments, message):
    outcome = script("run", *arguments)
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.status == 1 and len(errors) == 1 and message in errors[0], outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["scorer=tova", "scorer.press.window_size=16"],
            "error: there is no option scorer.press; scorer=tova takes share",
        ),
        (
            [
                "allocator=pyramid",
                "allocator.allocator._target_=kvstitch.allocators.SegmentQuota",
                "allocator.allocator.segmnt_mass=0.1",
            ],
            r"error: there is no option allocator.allocator.segmnt_mass; SegmentQuota takes batch, .*did you mean 'segment_mass'\?",
        ),
    ],
)
def test_names_that_our_own_parts_do_not_know(arguments, message, tmp_path):
    """In a process of its own: while tests run, the signatures of scorers and allocators are checked by someone else first."""
    command = [sys.executable, str(SCRIPTS / "run.py"), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    first, error = result.stderr.splitlines()
    assert result.returncode == 1 and first == "loading PyTorch and transformers" and re.match(message, error)


def test_nothing_else_is_changed_and_nothing_is_changed_twice(prepare):
    untouched = [
        "-m", "scorer=kvpress", "scorer.press._target_=kvpress.SnapKVPress", "+scorer.press.kernel_size=3", "~task.shard",
        "press.options={a: 1}", "allocator.num_recent=8", "sampling.top_p=0.5", "hydra.sweep.dir=x", "budget=128",
    ]  # fmt: skip
    assert prepare(*untouched) == untouched
    once = prepare(*untouched, "scorer.press.window_size=16")
    assert once == [*untouched, "++scorer.press.window_size=16"] == prepare(*once)
