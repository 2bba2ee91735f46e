"""The examples run as they stand, on a tiny model."""

import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, 97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{rng.randrange(3, 97)}" for _ in range(400)))
    return path


@pytest.fixture
def example(monkeypatch, capsys, model_folder):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--model", str(model_folder)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested_here():
    tested = Path(__file__).read_text()
    assert all(f'example("{path.name}"' in tested for path in EXAMPLES.glob("*.py"))


def test_compose_a_press(example):
    printed = example("compose_a_press.py", "--prompt", "w5 w6 w7", "--new-tokens", 90, "--budget", 24)
    assert printed.count("tokens seen") == 3 and "2 events" in printed
    stored = [
        int(line.split(" slots stored")[0].rsplit(" ", 1)[1]) for line in printed.splitlines() if "slots stored" in line
    ]
    assert len(stored) == 3 and max(stored) <= 24 + 32


def test_write_a_scorer(example, text):
    lines = example("write_a_scorer.py", text, "--length", 160, "--budget", 24).splitlines()
    assert [line.partition("(")[0] for line in lines] == ["ValueNorm", "ValueNorm", "Random"]
    assert len({line.partition("KL ")[2] for line in lines}) == 3 and "recency=0.5" in lines[1]


def test_compare_methods(example, text):
    printed = example("compare_methods.py", text, "w5 w6", "w9", "--budget", 32, "--new-tokens", 3)
    assert printed.count("==") == 4 and printed.count("w5 w6\n") == 4 and "SnapKV" in printed
