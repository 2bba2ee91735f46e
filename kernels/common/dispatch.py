"""Which implementation of an operator runs; imports neither Triton nor any operator."""

import os

from torch import Tensor

IMPLEMENTATIONS = ("auto", "triton", "reference")


def resolve_implementation(impl: str, tensor: Tensor) -> str:
    """ "triton" or "reference"; "auto" is Triton on CUDA tensors and the reference elsewhere.

    An explicit choice never falls back: "triton" on a machine without Triton fails at the import that follows.

    Raises: ValueError for an unknown name, and for "triton" on tensors that no Triton kernel can read.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if impl == "auto":
        return "triton" if tensor.is_cuda else "reference"
    if impl == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"impl='triton' needs CUDA tensors, got {tensor.device}; use impl='reference', or start Python with "
            "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
        )
    return impl


def require_triton_dtype(name: str, tensor: Tensor) -> None:
    """Raises: TypeError unless `tensor` is float32, bfloat16 or float16, what the Triton kernels are written for."""
    if str(tensor.dtype) not in ("torch.float32", "torch.bfloat16", "torch.float16"):
        raise TypeError(
            f"the Triton kernel reads float32, bfloat16 or float16, got {name} of {tensor.dtype}; use impl='reference'"
        )
