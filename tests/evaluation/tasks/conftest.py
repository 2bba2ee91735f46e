"""A tokenizer of one token a byte, so that lengths can be counted by hand, and files of records."""

import json

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, a begin token in front of a text, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(["<s>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "<s>{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=template)


@pytest.fixture
def lines(tmp_path):
    """`lines(*records, name=...)` -> path of a JSON Lines file; bytes are written as they are."""

    def write(*records, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
        return str(path)

    return write


@pytest.fixture
def first(tokenizer):
    """`first(task)` -> its first sample, and the text of its prompt and trace."""

    def take(task, positions=100_000):
        sample = next(iter(task.samples(tokenizer, positions)))
        return sample, tokenizer.decode(sample.prompt_ids + sample.trace_ids).removeprefix("<s>")

    return take
