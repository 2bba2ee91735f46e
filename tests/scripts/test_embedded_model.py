"""The default model and task from the command line of a fresh process, in a directory that is not the repository's."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).resolve().parents[2] / "scripts" / "run.py"


def test_the_main_command_on_the_embedded_model(tmp_path):
    command = [sys.executable, str(RUN), "press=ams", "scorer=tova", "budget=256"]
    smaller = [
        "task.num_samples=1",
        "task.length=1200",
        "task.num_questions=2",
        "task.prefill_tokens=256",
        "interval=256",
    ]
    done = subprocess.run(
        [*command, *smaller], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("reasoning-*")
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    assert (
        metrics["events"]["mean"] >= 3
        and metrics["peak_slots"]["mean"] <= 256 + 256 < metrics["dense_peak_slots"]["mean"]
    )
    # A model that reads English: far from a uniform guess (10.8 nats), and the dense model recalls what was stated.
    assert metrics["dense_nll"]["mean"] < 4 and 0 < metrics["kl"]["mean"] < 2
    assert metrics["kv_bytes"]["mean"] < metrics["dense_kv_bytes"]["mean"]
    assert "press=ams scorer=tova allocator=segment_quota" in done.stdout and "answers right" in done.stdout
    assert done.stdout.rstrip().endswith(f"run folder: {folder.relative_to(tmp_path)}")
