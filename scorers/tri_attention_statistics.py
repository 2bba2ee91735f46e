"""Offline query statistics for TriAttention: what calibration stores, and the checks when it is read back."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import safetensors
import torch
from jaxtyping import Bool, Complex64, Float32, Float64, Int64
from safetensors.torch import save_file
from torch import Tensor

from kvstitch.scorers.tri_attention_checks import layout_name, rotary_mismatch, shape_mismatch
from kvstitch.scorers.tri_attention_files import read_authors_file
from kvstitch.views import QueryStatistics, Rotary

UNKNOWN_COUNT = -1
_FORMAT = "kvstitch.tri_attention.1"
_TENSORS = ("m_re", "m_im", "a", "count", "inv_freq")
_TEXTS = ("attention_scaling", "layout", "model", "dtype", "text_sha256")


@dataclass(frozen=True, eq=False)
class TriAttentionStatistics:
    """Mean and mean modulus of each head's pre-RoPE queries per frequency (TriAttention, arXiv 2604.04921).

    Args:
        mean: `[L, Q, F]` complex mean of q (after q-norm, before RoPE).
        modulus: `[L, Q, F]` mean of |q|, never below |mean|.
        count: `[L, Q]` queries behind each head: 0 where there are none, -1 where the source does not tell.
        inverse_frequencies: `[F]` of the model that was calibrated; 0 for dims that it does not rotate, last.
        attention_scaling: of that model's RoPE.
        interleaved: layout of that model's RoPE.
        model: its name or path, for people.
        dtype: it computed in, for people.
        text_sha256: of the calibration text, for people.
        path: of the file that they were read from, for messages; not saved.

    Raises: ValueError for shapes that do not belong together, numbers that are not finite, or |mean| above modulus.
    """

    mean: Complex64[Tensor, "L Q F"]
    modulus: Float32[Tensor, "L Q F"]
    count: Int64[Tensor, "L Q"]
    inverse_frequencies: Float64[Tensor, "F"]
    attention_scaling: float
    interleaved: bool
    model: str = ""
    dtype: str = ""
    text_sha256: str = ""
    path: str = ""

    def __deepcopy__(self, memo: dict) -> "TriAttentionStatistics":
        # Nobody changes them, and a copied cache must still know its press.
        return self

    def __post_init__(self):
        layers, heads, frequencies = self.mean.shape
        expected = {
            "modulus": (layers, heads, frequencies),
            "count": (layers, heads),
            "inverse_frequencies": (frequencies,),
        }
        for name, shape in expected.items():
            actual = tuple(getattr(self, name).shape)
            if actual != shape:
                raise ValueError(f"{name} must have shape {list(shape)} to go with mean, got {list(actual)}")
        if not (self.mean.abs().isfinite().all() and self.modulus.isfinite().all()):
            raise ValueError("statistics hold numbers that are not finite; calibrate again")
        if (self.mean.abs() > self.modulus * 1.001 + 1e-6).any():
            raise ValueError("statistics hold a mean longer than the mean modulus, which no queries can have")

    @property
    def complete(self) -> bool:
        """Whether every head of every layer has statistics."""
        return bool((self.count != 0).all())

    def layer(
        self, layer_idx: int, device: torch.device
    ) -> tuple[Complex64[Tensor, "1 Q F"], Float32[Tensor, "1 Q F"], Bool[Tensor, "1 Q 1"]]:
        """Mean, mean modulus, and whether the head is covered, on `device`."""
        covered = (self.count[layer_idx] != 0)[None, :, None]
        return self.mean[layer_idx].to(device)[None], self.modulus[layer_idx].to(device)[None], covered.to(device)

    def check(self, rotary: Rotary, num_layers: int, num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise `ValueError` unless the statistics can belong to the live model.

        Args:
            rotary: of the model.
            num_layers: all decoder layers.
            num_query_heads: of a layer.
            num_kv_heads: of a layer.
            head_dim: dims of a head, those that RoPE leaves alone included.
        """
        wrong = shape_mismatch(self, num_layers, num_query_heads, num_kv_heads, head_dim)
        wrong = wrong or rotary_mismatch(self, rotary)
        if wrong is None:
            return
        source = f"statistics={self.path}" if self.path else "statistics"
        if self.model:
            source += f" of {self.model!r}"
        raise ValueError(f"{source} {wrong}; calibrate this model with scripts/calibrate.py")

    def save(self, path: str | PathLike) -> None:
        """Write a safetensors file; folders on the way are made."""
        tensors = {
            "m_re": self.mean.real.contiguous(),
            "m_im": self.mean.imag.contiguous(),
            "a": self.modulus.contiguous(),
            "count": self.count.contiguous(),
            "inv_freq": self.inverse_frequencies.contiguous(),
        }
        metadata = {
            "format": _FORMAT,
            "attention_scaling": repr(self.attention_scaling),
            "layout": layout_name(self.interleaved),
            "model": self.model,
            "dtype": self.dtype,
            "text_sha256": self.text_sha256,
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | PathLike) -> "TriAttentionStatistics":
        """Read what `save` wrote.

        Raises: FileNotFoundError; ValueError if the file is not safetensors, of another kind, or fails the checks.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no TriAttention statistics at {path}; scripts/calibrate.py writes them")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is not a safetensors file ({error}); for a .pt file of the TriAttention authors use "
                "TriAttentionStatistics.from_authors_file"
            ) from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} has format {metadata.get('format')!r}, expected {_FORMAT!r}")
        missing = [name for name in _TENSORS if name not in tensors] + [name for name in _TEXTS if name not in metadata]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        plain = {
            name: str(tensors[name].dtype) for name in ("m_re", "m_im", "a") if tensors[name].dtype != torch.float32
        }
        if plain or tensors["m_re"].shape != tensors["m_im"].shape or tensors["m_re"].dim() != 3:
            shapes = ", ".join(
                f"{name} {tensors[name].dtype} {list(tensors[name].shape)}" for name in ("m_re", "m_im", "a")
            )
            raise ValueError(f"{path} must hold float32 [L, Q, F] under m_re, m_im and a, got {shapes}")
        if metadata["layout"] not in (layout_name(True), layout_name(False)):
            raise ValueError(
                f"{path} has layout {metadata['layout']!r}, expected {layout_name(True)!r} or {layout_name(False)!r}"
            )
        return cls(
            mean=torch.complex(tensors["m_re"], tensors["m_im"]),
            modulus=tensors["a"],
            count=tensors["count"],
            inverse_frequencies=tensors["inv_freq"],
            attention_scaling=float(metadata["attention_scaling"]),
            interleaved=metadata["layout"] == layout_name(True),
            model=metadata["model"],
            dtype=metadata["dtype"],
            text_sha256=metadata["text_sha256"],
            path=str(path),
        )

    @classmethod
    def from_running(
        cls,
        layers: Sequence[QueryStatistics | None],
        rotary: Rotary,
        model: str = "",
        dtype: str = "",
        text_sha256: str = "",
    ) -> "TriAttentionStatistics":
        """From the running sums of a calibration pass, one entry a layer, rows of a batch added up.

        Args:
            layers: None for a layer without statistics (sliding attention).
        """
        known = [layer for layer in layers if layer is not None]
        if not known:
            raise ValueError("layers must hold the statistics of at least one layer, got none")
        heads, planes = known[0].total.shape[1:]
        mean = torch.zeros(len(layers), heads, planes, dtype=torch.complex64)
        modulus = torch.zeros(len(layers), heads, planes)
        count = torch.zeros(len(layers), heads, dtype=torch.int64)
        for index, layer in enumerate(layers):
            if layer is None:
                continue
            queries = layer.count.sum().cpu()
            count[index] = queries
            mean[index] = layer.total.sum(dim=0).cpu() / queries.clamp(min=1)
            modulus[index] = layer.modulus.sum(dim=0).cpu() / queries.clamp(min=1)
        frequencies = torch.zeros(planes, dtype=torch.float64)
        frequencies[: len(rotary.inverse_frequencies)] = rotary.inverse_frequencies
        return cls(
            mean, modulus, count, frequencies, rotary.attention_scaling, rotary.interleaved, model, dtype, text_sha256
        )

    @classmethod
    def from_authors_file(
        cls, path: str | PathLike, rotary: Rotary, num_layers: int, num_query_heads: int, head_dim: int
    ) -> "TriAttentionStatistics":
        """Read a `.pt` file of the authors of TriAttention (github.com/WeianMao/triattention).

        Those files hold no frequencies: whether they belong to `rotary` cannot be checked beyond shape and layout, and
        for models with q-norm nobody can tell whether it was applied. Heads that the file lacks are left uncovered.

        Args:
            rotary: of the live model that the file is meant for.
            num_layers: its decoder layers.
            num_query_heads: of a layer.
            head_dim: dims of a head.

        Raises: FileNotFoundError; ValueError if the file is of another kind, or has a head, layout or width that the
            model lacks, or if the model turns a part of each head only.
        """
        content = read_authors_file(path)
        if rotary.rotated_dims != head_dim:
            # The files pair dim f with f + D / 2. A mean vector could be cut into other planes, mean moduli cannot; and
            # with as few planes as turn they would say nothing of the rest, which padding would take for queries of 0.
            raise ValueError(
                f"{path}: files of the TriAttention authors describe heads that RoPE turns as a whole, the model's turns "
                f"{rotary.rotated_dims} of {head_dim} dims; calibrate this model on a text instead (text=FILE)"
            )
        if content.layout != layout_name(rotary.interleaved):
            raise ValueError(
                f"{path} pairs dims as {content.layout!r}, the model's RoPE as {layout_name(rotary.interleaved)!r}"
            )

        frequencies = rotary.inverse_frequencies.to("cpu", torch.float64)
        mean = torch.zeros(num_layers, num_query_heads, len(frequencies), dtype=torch.complex64)
        modulus = torch.zeros(num_layers, num_query_heads, len(frequencies))
        count = torch.zeros(num_layers, num_query_heads, dtype=torch.int64)
        for head in content.heads:
            if head.layer_idx >= num_layers or head.head_idx >= num_query_heads:
                raise ValueError(
                    f"{path}: {head.key} does not exist in a model of {num_layers} layers with {num_query_heads} heads"
                )
            if head.modulus.shape != frequencies.shape:
                raise ValueError(
                    f"{path}: {head.key} holds {len(head.modulus)} frequencies, for a head of {2 * len(head.modulus)} "
                    f"dims; the model's heads have {head_dim} dims, which are {len(frequencies)} frequencies"
                )
            mean[head.layer_idx, head.head_idx] = head.mean
            modulus[head.layer_idx, head.head_idx] = head.modulus
            count[head.layer_idx, head.head_idx] = UNKNOWN_COUNT
        return cls(mean, modulus, count, frequencies, rotary.attention_scaling, rotary.interleaved, content.model)
