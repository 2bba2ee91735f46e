"""Every leaf of every file of the configuration takes what its annotation says, or is refused in one message about it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WORKER = Path(__file__).with_name("leaves_worker.py")
NAMES = [
    *(
        f"{group}/{path.stem}"
        for group in ("task", "scorer", "allocator", "press", "model")
        for path in sorted((CONFIGS / group).glob("*.yaml"))
    ),
    "sampling",
]
WITHOUT_OPTIONS = (
    "press/dense", "scorer/keydiff", "scorer/keynorm", "scorer/streaming_llm", "allocator/window_retrieval"
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """What became of each file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, str(WORKER)], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_refused_in_one_message_that_names_its_option(found, name):
    if "skip" in found[name]:
        pytest.skip(found[name]["skip"])
    assert found[name]["tried"] or name in WITHOUT_OPTIONS
    assert not found[name]["faults"], "\n".join(found[name]["faults"])
