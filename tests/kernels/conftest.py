"""Runs the Triton kernels for the tests: on a GPU if there is one, else in Triton's interpreter in another process."""

import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch


class Ran(NamedTuple):
    """What an operator returned, and its positional arguments after it ran (changed, if it works in place)."""

    result: Any
    arguments: tuple


@pytest.fixture(scope="session")
def run_triton() -> Iterator[Callable[..., Ran]]:
    """`run_triton(operator, *args, **kwargs)` with `impl="triton"`; takes and returns CPU tensors."""
    if sys.platform != "linux":
        pytest.skip("Triton exists for Linux only")
    if torch.cuda.is_available():
        yield _run_on_gpu
        return
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("interpreter_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )

    def run(operator: Callable, *args, **kwargs) -> Ran:
        pickle.dump((operator.__module__, operator.__name__, args, kwargs), worker.stdin)
        worker.stdin.flush()
        status, result, arguments = pickle.load(worker.stdout)
        if status == "error":
            pytest.fail(f"the kernel failed in Triton's interpreter:\n{result}")
        return Ran(result, arguments)

    yield run
    worker.stdin.close()
    worker.wait()


def _run_on_gpu(operator: Callable, *args, **kwargs) -> Ran:
    moved = _to("cuda", args)
    torch.use_deterministic_algorithms(True)
    try:
        result = getattr(importlib.import_module(operator.__module__), operator.__name__)(
            *moved, **_to("cuda", kwargs), impl="triton"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    return Ran(_to("cpu", result), _to("cpu", moved))


def _to(device: str, value: Any) -> Any:
    """`value` with every tensor inside it copied to `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if dataclasses.is_dataclass(value):
        moved = {field.name: _to(device, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    if isinstance(value, dict):
        return {name: _to(device, item) for name, item in value.items()}
    if hasattr(value, "_fields"):
        return type(value)(*(_to(device, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_to(device, item) for item in value)
    return value


@pytest.fixture
def assert_as_accurate() -> Callable[..., None]:
    """The tolerance rule of the kernels: at most twice the error of the low-precision reference, plus one rounding.

    `magnitude` is the size of the numbers that are rounded, where those of the result are not the largest: float32
    weights carry the rounding of their logits.
    """

    def check(
        name: str, actual: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, magnitude: float = 1.0
    ) -> None:
        assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
        assert torch.isfinite(actual.float()).all(), f"{name} has entries that were never written, or overflowed"
        rounding = torch.finfo(actual.dtype).eps * exact.abs().max().item() * magnitude
        error = (actual.double() - exact).abs().max().item()
        allowed = 2 * (reference.double() - exact).abs().max().item() + rounding
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"

    return check


@pytest.fixture(scope="session")
def assert_same_plan() -> Callable[..., None]:
    """`assert_same_plan(found, expected)`: every tensor of two segment plans, floats in float64."""

    def assert_same_plan(found, expected):
        for name in expected._fields:
            actual, want = getattr(found, name), getattr(expected, name)
            if want.is_floating_point():
                torch.testing.assert_close(actual.double(), want.double(), atol=1e-12, rtol=1e-9, msg=name)
            else:
                assert torch.equal(actual, want), name

    return assert_same_plan
