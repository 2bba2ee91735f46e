"""What a run ran on: versions, commit, command, hardware."""

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvstitch.evaluation.records import RUN_META, RunFolder

PACKAGES = ("kvstitch", "torch", "transformers", "kvpress", "triton", "numpy", "datasets", "hydra-core")


def session(seed: int) -> dict[str, Any]:
    """One start of a run, as `run_meta.json` lists it."""
    return {
        "started": timestamp(),
        "command": [sys.executable, *sys.argv],
        "directory": os.getcwd(),
        "seed": seed,
        "commit": commit(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES}
        | {"torch": str(torch.__version__)},  # with its build, e.g. +cu130
        "hardware": hardware(),
    }


@contextmanager
def recorded_session(folder: RunFolder, seed: int) -> Iterator[None]:
    """Add this start of the run to `run_meta.json`, and how it ended when the block is left; earlier ones stay.

    A session without `ended` was killed.
    """
    sessions = (folder.read_json(RUN_META) or {"sessions": []})["sessions"]
    current = session(seed)
    sessions.append(current)
    folder.write_json(RUN_META, {"sessions": sessions})
    outcome = "finished"
    try:
        yield
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        current |= {"ended": timestamp(), "outcome": outcome} | peak_memory()
        folder.write_json(RUN_META, {"sessions": sessions})


def timestamp() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def hardware() -> dict[str, Any]:
    """Processor, memory, threads and GPUs."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
    }


def peak_memory() -> dict[str, int | None]:
    """Most memory since `reset_peak_memory`, in bytes, measured: of the process, resident, and of all GPUs, as PyTorch
    allocated it; None without a GPU. Where the kernel cannot forget a peak, the process's is that since it started."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "peak_process_bytes": _peak_resident(),
        "peak_device_bytes": sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) if gpus else None,
    }


def reset_peak_memory() -> None:
    """Forget the peaks so far."""
    try:
        # Linux: 5 resets the peak of the resident set (man 5 proc); everywhere else there is no such file.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
    for gpu in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        torch.cuda.reset_peak_memory_stats(gpu)


def _peak_resident() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # The kernel counts in KiB, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def commit() -> str | None:
    """Commit of the checkout that this code was imported from, `+changes` if it was edited; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    # An installed copy may lie inside somebody else's repository.
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _git(root, "status", "--porcelain") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
