"""Compiles what a launcher would launch, for a GPU that need not be present, and measures what the code takes."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# Shared memory that one program may use, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the launcher wrote it."""

    kernel: JITFunction
    arguments: dict
    options: dict


@dataclass(frozen=True)
class Resources:
    """What the machine code of one kernel takes on one target."""

    kernel: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    cubin_bytes: int
    ptx: str

    @property
    def within_budget(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_LIMIT[self.capability] and self.cubin_bytes > 0


def record_launches(launcher: Callable[[], object]) -> list[Launch]:
    """The launches that `launcher` makes; nothing runs, so its tensors may live on the meta device."""
    launches = []
    with _recording(launches):
        launcher()
    return launches


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for `sm_<capability>` down to machine code."""
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    registers, spill_bytes = _machine_code_usage(compiled.asm["cubin"])
    return Resources(
        kernel=launch.kernel.__name__,
        capability=capability,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        cubin_bytes=len(compiled.asm["cubin"]),
        ptx=compiled.asm["ptx"],
    )


@contextmanager
def _recording(launches: list[Launch]) -> Iterator[None]:
    def record(kernel, *args, grid, warmup, **kwargs):
        names = kernel.arg_names
        arguments = dict(zip(names, args)) | {name: kwargs.pop(name) for name in names if name in kwargs}
        launches.append(Launch(kernel, arguments, kwargs))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = original


def _specialise(launch: Launch) -> tuple[dict, dict, dict]:
    """Types, constants and alignment of the arguments, as Triton's own launch path would specialise them."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            # The caching allocator aligns to 512 bytes.
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _machine_code_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of thread-local memory (spills: no kernel of ours asks for any)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]
