"""A tiny model on the disk, records to evaluate it on, and the scripts run in this process."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
VOCABULARY = 97


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama of three layers with a tokenizer of the words w3 to w96."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def records(tmp_path):
    """Three records of 10 words of prompt and 90 of trace."""
    rng = random.Random(1)
    words = lambda count: " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(count))
    path = tmp_path / "records.jsonl"
    lines = [json.dumps({"prompt": words(10), "trace": words(90), "answer": "w5"}) for _ in range(3)]
    path.write_text("\n".join(lines) + "\n")
    return path


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """`script("run", *arguments)` -> exit status and what was printed; runs in an empty working directory."""
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(SCRIPTS)
    directory = tmp_path / "somewhere"
    directory.mkdir()
    monkeypatch.chdir(directory)
    # The script sets it for its process.
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(name: str, *arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        spec = importlib.util.spec_from_file_location(f"kvstitch_script_{name}", SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        capsys.readouterr()
        status = module.main()
        printed = capsys.readouterr()
        return Outcome(status, printed.out, printed.err)

    return call


@pytest.fixture
def tiny_arguments(tiny_folder, records):
    """A run of a second: three samples, five events each."""
    return (
        "model=hub",
        f"model.name={tiny_folder}",
        "model.device=cpu",
        "task=jsonl",
        f"task.path={records}",
        "task.trace_field=trace",
        "task.cue=' w7 w8'",
        "task.max_new_tokens=3",
        "budget=40",
        "interval=16",
        "allocator.num_recent=8",
        "speed_tokens=2",
    )
