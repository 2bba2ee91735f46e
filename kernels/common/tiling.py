"""Tile shapes and precision of Triton launches."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """One launch configuration: rows and columns of a tile, warps of a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def next_power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def dot_precision(tensor: Tensor) -> str:
    """How `tl.dot` multiplies float32 (the other dtypes ignore it); plain TF32 would lose half the digits.

    Three TF32 products keep float32's accuracy on tensor cores, but hold both parts of the queries in registers, where
    a head dim of 256 does not fit.
    """
    return "tf32x3" if tensor.shape[-1] <= 128 else "ieee"
