"""The `.pt` files of the authors of TriAttention (github.com/WeianMao/triattention): what they hold, checked."""

import pickle
import re
import zipfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from jaxtyping import Complex64, Float32
from torch import Tensor

_PARTS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


@dataclass(frozen=True, eq=False)
class AuthorsHead:
    """One query head: mean query and mean modulus at each frequency; `key` is its name in the file."""

    key: str
    layer_idx: int
    head_idx: int
    mean: Complex64[Tensor, "F"]
    modulus: Float32[Tensor, "F"]


@dataclass(frozen=True, eq=False)
class AuthorsFile:
    """Heads in the order of the file; `layout` is "half" or "interleaved" as far as the authors say."""

    heads: tuple[AuthorsHead, ...]
    layout: str
    model: str


def read_authors_file(path: str | PathLike) -> AuthorsFile:
    """Read a file without running any code in it.

    Raises: FileNotFoundError; ValueError if the file has another structure.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no TriAttention statistics at {path}")
    content = _unpickled(path)
    if not isinstance(content, dict) or not isinstance(content.get("stats"), dict) or not content["stats"]:
        raise ValueError(f"{path} is no TriAttention statistics file: it has no entry 'stats' with heads")
    metadata = content.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} is no TriAttention statistics file: its 'metadata' is a {type(metadata).__name__}")
    heads = tuple(_head(path, key, entry) for key, entry in content["stats"].items())
    return AuthorsFile(heads, str(metadata.get("rope_style", "half")), str(metadata.get("model_name", "")))


def _unpickled(path: str | PathLike) -> object:
    # torch.load fails on other files with whatever error their first bytes lead to.
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} was not written by torch.save")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # A damaged pickle may stop the reader anywhere.
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        LookupError,
        TypeError,
        AssertionError,
        ValueError,
    ) as error:
        raise ValueError(f"{path} holds more than tensors, or is damaged: {error}") from error


def _head(path: str | PathLike, key: object, entry: object) -> AuthorsHead:
    match = re.fullmatch(r"layer(\d+)_head(\d+)", key) if isinstance(key, str) else None
    if match is None:
        raise ValueError(f"{path}: entry {key!r} is not named layerNN_headNN")
    parts = [entry.get(name) for name in _PARTS] if isinstance(entry, dict) else []
    if not parts or not all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
        raise ValueError(f"{path}: {key} must hold one number a frequency under each of {', '.join(_PARTS)}")
    real, imaginary, modulus = (part.float() for part in parts)
    if not real.shape == imaginary.shape == modulus.shape:
        sizes = ", ".join(f"{name} {len(part)}" for name, part in zip(_PARTS, parts))
        raise ValueError(f"{path}: {key} holds different numbers of frequencies: {sizes}")
    return AuthorsHead(key, int(match[1]), int(match[2]), torch.complex(real, imaginary), modulus)
