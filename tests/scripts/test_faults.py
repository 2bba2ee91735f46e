"""What kills or stops a run in the middle loses and duplicates no sample, and leaves no empty folder behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "scripts" / "run.py"


def folders(directory="runs"):
    return sorted(path for path in Path(directory).glob("*") if not path.name.startswith("."))


def without_times(line):
    record = json.loads(line)
    unsteady = ("second", "time", "peak_process", "dense_reused")
    record["metrics"] = {
        name: value for name, value in record["metrics"].items() if not any(part in name for part in unsteady)
    }
    return record


def test_kill_minus_nine_and_a_second_process_lose_and_duplicate_nothing(script, tiny_arguments, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text() * 4)
    command = [sys.executable, str(RUN), *tiny_arguments]
    process = subprocess.Popen(
        command, cwd=os.getcwd(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not list(Path("runs").glob("*/predictions.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    # Held still, so that the folder surely is in use while the second one asks for it.
    process.send_signal(signal.SIGSTOP)
    second = script("run", *tiny_arguments)
    assert second.status == 1 and "another process is at work on" in second.err and "Traceback" not in second.err
    (folder,) = folders()
    assert not (folder / "error.txt").exists()
    # A job of a sweep, whose failures go into their folders, leaves this one alone, too.
    swept = script("run", "-m", *tiny_arguments, "seed=42")
    assert swept.status == 1 and "another process is at work on" in swept.err
    assert not (folder / "error.txt").exists()
    process.kill()
    process.wait()
    kept = (folder / "predictions.jsonl").read_bytes()
    assert 1 <= kept.count(b"\n") < 12

    third = script("run", *tiny_arguments)
    assert third.status == 0 and "resuming: " in third.err
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    assert len({json.loads(line)["id"] for line in lines}) == len(lines) == 12
    whole = kept[: kept.rfind(b"\n") + 1]
    assert (folder / "predictions.jsonl").read_bytes().startswith(whole)
    # What a run without any fault gives.
    assert script("run", *tiny_arguments, "output_dir=undisturbed").status == 0
    (other,) = folders("undisturbed")
    expected = (other / "predictions.jsonl").read_text().splitlines()
    assert list(map(without_times, lines)) == list(map(without_times, expected))


def test_a_full_disk_keeps_what_was_finished(script, tiny_arguments, monkeypatch):
    from kvstitch.evaluation import records

    real = records.os.fsync

    def full(descriptor):
        content = [path.read_bytes().count(b"\n") for path in Path("runs").glob("*/predictions.jsonl")]
        if content and content[0] > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(records.os, "fsync", full)
    outcome = script("run", *tiny_arguments)
    assert outcome.status == 1 and "No space left on device" in outcome.err and "Traceback" not in outcome.err
    monkeypatch.setattr(records.os, "fsync", real)
    (folder,) = folders()
    assert not (folder / "metrics.json").exists()
    again = script("run", *tiny_arguments)
    assert again.status == 0, again.err
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    assert len({json.loads(line)["id"] for line in lines}) == len(lines) == 3


@pytest.mark.parametrize(
    "change, message",
    [("model.name=/nowhere/model", "no such folder"), ("task.path=/nowhere/records.jsonl", "/nowhere/records.jsonl")],
)
def test_what_cannot_start_leaves_no_folder(script, tiny_arguments, change, message):
    outcome = script("run", *tiny_arguments, change)
    assert outcome.status == 1 and message in outcome.err and not folders()


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"prompt": 3, "answer": "w5"}\n', "records.jsonl:4: field 'prompt' must hold text, got 3"),
        ('{"prompt": "w3"}\n', "records.jsonl:4: no field 'answer', it has 'prompt'"),
        (None, "records.jsonl is empty; it must hold one JSON object a line"),
    ],
)
def test_records_that_cannot_be_used_are_told_before_the_model_is_loaded(
    script, tiny_arguments, records, content, message
):
    records.write_text("" if content is None else records.read_text() + content)
    outcome = script("run", *tiny_arguments, "task.trace_field=null", "model.name=/nowhere/model")
    assert outcome.status == 1 and message in outcome.err and "/nowhere/model" not in outcome.err and not folders()


def test_a_folder_with_finished_samples_stays_when_a_later_session_fails(script, tiny_arguments, monkeypatch):
    from kvstitch.evaluation import runner

    def broken(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "summary", broken)
        assert script("run", *tiny_arguments).status == 1
    (folder,) = folders()
    assert "RuntimeError: a bug" in (folder / "error.txt").read_text()
    assert script("run", *tiny_arguments).status == 0 and not (folder / "error.txt").exists()


def test_nan_logits_stop_the_sample_by_name_and_not_the_sweep(script, tiny_arguments, tiny_folder, tmp_path):
    import math
    import shutil

    from safetensors.torch import load_file, save_file

    poisoned = tmp_path / "poisoned"
    shutil.copytree(tiny_folder, poisoned)
    weights = load_file(poisoned / "model.safetensors")
    words = [set(json.loads(line)["prompt"].split()) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    only = next(iter(words[1] - words[0] - words[2] - {"w7", "w8", "w5"}))
    path = tmp_path / "records.jsonl"
    records = [json.loads(line) | {"trace": "w7 w8 " * 40} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    weights["model.embed_tokens.weight"][int(only[1:])] = math.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    arguments = [*(text for text in tiny_arguments if not text.startswith("model.name")), f"model.name={poisoned}"]
    retrieval = ["press=community", "press.num_sinks=1", "press.num_recent=4", "allocator.top_k=3", "decode_tokens=8"]
    for name, options in {
        "replay": ["mode=replay"],
        "generate": ["mode=generate"],
        "retrieval": ["mode=replay", *retrieval],
        "retrieval_generate": ["mode=generate", *retrieval],
    }.items():
        common = [text for text in arguments if "retrieval" not in name or not text.startswith("allocator.")]
        outcome = script("run", "-m", *common, *options, f"output_dir={name}", "seed=1,2")
        assert outcome.status == 1 and outcome.out.count("1 of 3 samples failed") == 2, outcome.err
        for folder in folders(name):
            metrics = json.loads((folder / "metrics.json").read_text())
            (name,) = metrics["failed_samples"]
            assert (
                name in outcome.out and metrics["num_samples"] == 3 and metrics["metrics"]["dense_accuracy"]["n"] == 2
            )
