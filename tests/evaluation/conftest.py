"""A tiny random model with a tokenizer, simple parts of a press, and a task of two samples."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvstitch.allocators import EvictingAllocator, Selection
from kvstitch.evaluation.models import LoadedModel
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.presses import EvictionPress
from kvstitch.scorers import Scorer

VOCABULARY = 97


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def build_tiny() -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        # Larger weights make attention sharp, so that an eviction shows in the logits.
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return LoadedModel(
        model,
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"),
    )


@pytest.fixture
def tiny():
    return build_tiny()


@dataclass(frozen=True)
class KeyHash(Scorer):
    """A deterministic score without any meaning."""

    def score(self, view):
        return torch.sin(view.keys.float().sum(-1) * 7.0)


@dataclass(frozen=True)
class SimpleTopK(EvictingAllocator):
    """Best-scored slots; the first and the newest are always kept."""

    num_sinks: int = 1
    num_recent: int = 1

    def allocate(self, view, scores, keep, state):
        guarded = scores.clone()
        guarded[..., :1] = guarded[..., -1:] = torch.inf
        return Selection(guarded.topk(min(int(keep.max()), scores.shape[-1]), dim=-1).indices.sort(dim=-1).values)


@pytest.fixture
def make_press():
    """`make_press(budget, interval, ...)`."""

    def make(budget=24, interval=16, **options):
        return EvictionPress(KeyHash(), SimpleTopK(), budget=budget, interval=interval, **options)

    return make


@dataclass(frozen=True, kw_only=True)
class ListTask(Task):
    """Hands out what it was given."""

    items: tuple[Sample, ...] = ()

    def samples(self, tokenizer, max_positions) -> Iterator[Sample]:
        yield from self.items


@pytest.fixture
def make_sample():
    """`make_sample(id, prompt=10, trace=90, questions=1)` of random tokens; the answer wanted is `w5`."""

    def make(id: str, prompt: int = 10, trace: int = 90, questions: int = 1, max_new_tokens: int = 4) -> Sample:
        generator = torch.Generator().manual_seed(sum(id.encode()))
        ids = torch.randint(3, VOCABULARY, (prompt + trace,), generator=generator).tolist()
        asked = tuple(Question("cue", (7 + index, 8), ("w5",), max_new_tokens) for index in range(questions))
        return Sample(id, tuple(ids[:prompt]), tuple(ids[prompt:]), asked)

    return make


@pytest.fixture
def make_task():
    """`make_task(samples)`."""

    def make(samples) -> ListTask:
        return ListTask(
            num_samples=len(samples),
            prefill_tokens=None,
            chat=False,
            grader="first_word",
            max_new_tokens=4,
            seed=1,
            items=tuple(samples),
        )

    return make
