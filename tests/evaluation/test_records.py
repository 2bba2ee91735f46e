"""The run folder survives whatever kills a run, and never mixes two runs."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvstitch.evaluation.records import RunError, RunFolder, config_hash, folder_name


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_the_hash_knows_every_value_but_not_the_order():
    config = {"budget": 256, "press": {"scorer": {"share": "layer"}, "interval": 512}, "seed": 1}
    same = {"seed": 1, "press": {"interval": 512, "scorer": {"share": "layer"}}, "budget": 256}
    assert config_hash(config) == config_hash(same) and len(config_hash(config)) == 12
    for other in ({"seed": 2}, {"budget": 256.0}, {"budget": "256"}, {"extra": None}):
        assert config_hash(config | other) != config_hash(config)


def test_the_folder_is_named_readably(tmp_path):
    name = folder_name(["reasoning", "ams", "", "../x y", "64MiB"], {"a": 1})
    assert name == f"reasoning-ams-.._x_y-64MiB-{config_hash({'a': 1})}" and "/" not in name


def test_records_come_back_in_order(folder):
    with folder.opened("a: 1\n"):
        assert folder.read_records() == []
        for index in range(3):
            folder.append({"id": f"s{index}", "text": "naïve\nline", "metrics": {"kl": None}})
        assert [record["id"] for record in folder.read_records()] == ["s0", "s1", "s2"]
        assert folder.read_records()[1]["text"] == "naïve\nline"
        assert (folder.path / "config.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_torn_last_line_is_cut_off(folder, cut):
    with folder.opened(""):
        folder.append({"id": "s0", "value": 1})
        whole = folder.predictions.read_bytes()
        folder.append({"id": "s1", "value": 2})
        content = folder.predictions.read_bytes()
        folder.predictions.write_bytes(content[: -1 - cut])
        assert [record["id"] for record in folder.read_records()] == ["s0"]
        assert folder.predictions.read_bytes() == whole
        folder.append({"id": "s1", "value": 2})
        assert folder.predictions.read_bytes() == content


def test_a_last_line_that_lacks_only_its_newline_is_kept(folder):
    with folder.opened(""):
        folder.append({"id": "s0"})
        content = folder.predictions.read_bytes()
        folder.predictions.write_bytes(content[:-1])
        assert folder.read_records() == [{"id": "s0"}]
        assert folder.predictions.read_bytes() == content


@pytest.mark.parametrize("cut, ids", [(1, ["s0", "s1"]), (6, ["s0"])], ids=["newline", "text"])
def test_whoever_only_looks_on_writes_nothing(folder, cut, ids):
    """Another process may be at the very line that lacks its end."""
    with folder.opened(""):
        folder.append({"id": "s0", "value": 1})
        folder.append({"id": "s1", "value": 2})
    torn = folder.predictions.read_bytes()[:-cut]
    folder.predictions.write_bytes(torn)
    assert [record["id"] for record in folder.read_records()] == ids
    assert folder.predictions.read_bytes() == torn
    # The holder of the lock reads the same and mends it.
    with folder.opened(""):
        assert [record["id"] for record in folder.read_records()] == ids
        assert folder.predictions.read_bytes() != torn


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken", "line 2, is not a record"),
        ('{"id": "s1", "kl": NaN}', "line 2, is not a record"),
        ('{"id": "s0"}', "line 2, repeats sample 's0'"),
    ],
)
def test_what_no_interrupted_write_explains_is_refused(folder, line, message):
    with folder.opened(""):
        folder.append({"id": "s0"})
        with folder.predictions.open("a") as file:
            file.write(line + "\n")
        with pytest.raises(RunError, match=message):
            folder.read_records()


def test_numbers_that_json_lacks_are_refused_before_anything_is_written(folder):
    with folder.opened(""):
        with pytest.raises(ValueError):
            folder.append({"id": "s0", "kl": float("nan")})
        assert folder.read_records() == []


def test_another_configuration_is_refused(folder):
    with folder.opened("a: 1\n"):
        pass
    with pytest.raises(RunError, match="is not the configuration of this run"):
        with folder.opened("a: 2\n"):
            pass
    assert (folder.path / "config.yaml").read_text() == "a: 1\n"


def test_json_files_are_replaced_whole(folder):
    with folder.opened(""):
        assert folder.read_json("x.json") is None
        folder.write_json("x.json", {"a": 1})
        folder.write_json("x.json", {"a": 2})
        assert folder.read_json("x.json") == {"a": 2}
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "config.yaml", "x.json"]


_WRITER = """
import sys
from pathlib import Path
from kvstitch.evaluation.records import RunError, RunFolder
folder = RunFolder(Path(sys.argv[1]))
try:
    with folder.opened(""):
        print("open", flush=True)
        number = len(folder.read_records())
        while True:
            folder.append({"id": f"s{number}", "text": "x" * 5000})
            number += 1
except RunError as error:
    print(error, flush=True)
"""


def start_writer(path):
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)


def test_kill_minus_nine_and_a_second_process_lose_and_duplicate_nothing(folder):
    first = start_writer(folder.path)
    assert first.stdout.readline() == "open\n"
    second = start_writer(folder.path)
    assert "another process is at work on" in second.communicate(timeout=60)[0]
    deadline = time.monotonic() + 60
    while not folder.predictions.exists() or folder.predictions.stat().st_size < 20_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    complete = folder.predictions.read_bytes().count(b"\n")
    # The lock died with its holder.
    with folder.opened(""):
        records = folder.read_records()
        assert [record["id"] for record in records] == [f"s{index}" for index in range(len(records))]
        assert len(records) >= complete >= 3
    assert all(json.loads(line) for line in folder.predictions.read_bytes().splitlines())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_an_error_and_not_a_record(folder):
    with folder.opened(""):
        folder.predictions.symlink_to("/dev/full")
        with pytest.raises(
            RunError, match="cannot write .*: No space left on device; the samples finished before are kept"
        ):
            folder.append({"id": "s0"})


def test_a_full_disk_leaves_the_old_file_and_no_scratch(folder, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with folder.opened(""):
        folder.write_json("x.json", {"a": 1})
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="cannot write .*x.json: No space left on device"):
            folder.write_json("x.json", {"a": 2})
        assert folder.read_json("x.json") == {"a": 1}
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "config.yaml", "x.json"]


@pytest.mark.parametrize("content", [b'{"a": 1', b"[1]", b"\xff\xfe", b""], ids=["torn", "list", "bytes", "empty"])
def test_files_that_cannot_be_read_any_more_are_named(folder, content):
    with folder.opened("a: 1\n"):
        folder.write_json("x.json", {"a": 1})
    assert folder.read_config() == {"a": 1}
    for name in ("x.json", "config.yaml"):
        (folder.path / name).write_bytes(content if name == "x.json" else content.replace(b'"a": 1', b"a: [1"))
    for read, name in ((lambda: folder.read_json("x.json"), "x.json"), (folder.read_config, "config.yaml")):
        with pytest.raises(RunError, match=rf"{name} is damaged \(.+\); move .*run away"):
            read()
    (folder.path / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"is no run folder: it has no config\.yaml"):
        folder.read_config()
