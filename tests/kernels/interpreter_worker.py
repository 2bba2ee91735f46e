"""Runs operators under Triton's interpreter for the tests; started by conftest.py, talks in pickles.

A process of its own, because the interpreter takes effect only if TRITON_INTERPRET is set before Triton is imported,
and because in a process where it is set nothing can be compiled any more.
"""

import importlib
import pickle
import sys
import traceback

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def multiply_bfloat16_as_numbers() -> None:
    """The interpreter holds bfloat16 as uint16 and multiplies the bit patterns; a GPU multiplies the numbers."""
    original = interpreter.InterpreterBuilder.create_dot

    def as_float32(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, as_float32(a), as_float32(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_the_language_once() -> None:
    """Every call of a device function patches all of triton.language again, which takes nearly all of the time; what it
    patches beyond the launch around it stays patched, so once for each function is enough."""
    patched = set()

    def call(self, *args, **kwargs):
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def serve() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            module, function, args, kwargs = pickle.load(requests)
        except EOFError:
            return
        try:
            result = getattr(importlib.import_module(module), function)(*args, **kwargs, impl="triton")
            answer = ("result", result, args)
        except Exception:
            answer = ("error", traceback.format_exc(), None)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Fills every new buffer with NaN (or the largest integer), so that what a kernel fails to write shows.
    torch.use_deterministic_algorithms(True)
    multiply_bfloat16_as_numbers()
    patch_the_language_once()
    serve()
