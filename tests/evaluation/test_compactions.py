"""Arrays of a run folder are whole or not there, as its records are."""

import errno
import os

import numpy as np
import pytest

from kvstitch.evaluation.compactions import save_arrays
from kvstitch.evaluation.records import RunError


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_disk_that_is_full_while_arrays_are_written(tmp_path):
    # The scratch file on the full disk.
    (tmp_path / f".x.npz.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot write .*x.npz: No space left on device"):
        save_arrays(tmp_path / "x.npz", {"a": np.random.default_rng(0).random(10_000)})
    assert list(tmp_path.iterdir()) == []


def test_arrays_are_on_the_disk_before_they_take_their_place(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    save_arrays(path, {"a": np.arange(3)})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="cannot write .*x.npz: No space left on device"):
            save_arrays(path, {"a": np.arange(4)})
    assert list(tmp_path.iterdir()) == [path]
    with np.load(path) as arrays:
        assert arrays["a"].tolist() == [0, 1, 2]


def test_an_interruption_leaves_no_scratch_file(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_arrays(tmp_path / "x.npz", {"a": np.arange(3)})
    assert list(tmp_path.iterdir()) == []
