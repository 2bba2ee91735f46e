"""What generated tasks share: documents filled with as many units as a number of tokens admits, seeded, one by one."""

import random
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_least
from kvstitch.evaluation.tasks.base import Sample, Scalar
from kvstitch.evaluation.tasks.encoding import encode
from kvstitch.evaluation.tasks.fields import gold_field, text_field
from kvstitch.evaluation.tasks.prose import sentences
from kvstitch.evaluation.tasks.records import Parts, Records
from kvstitch.evaluation.tasks.sources import Found, Record, file_records, read_text

_SENTENCE = re.compile(r"\S.*?[.!?][\"'”’)\]]*(?=\s|$)|\S.*$")


@dataclass(frozen=True)
class Draft:
    """A document of some size: what is read, what is asked, what is wanted, and what plots group by."""

    context: str
    question: str
    gold: tuple[str, ...]
    meta: Mapping[str, Scalar] = field(default_factory=dict)

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of context and question, each by itself, without those that the tokenizer puts around a text."""
        return len(encode(tokenizer, self.context)) + len(encode(tokenizer, self.question))

    def record(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """As a record that `Generated.parts` reads."""
        facts = {**self.meta, "tokens": self.tokens(tokenizer)}
        return {"context": self.context, "question": self.question, "outputs": list(self.gold), "meta": facts}


def longest(
    draft: Callable[[int], Draft], tokenizer: PreTrainedTokenizerBase, tokens: int, least: int, most: int | None = None
) -> Draft:
    """The draft of the most units that has at most `tokens` tokens.

    Args:
        draft: deterministic; more units never take fewer tokens.
        least: smallest number of units that makes sense.
        most: largest number of units there is; `None`: no limit.

    Raises:
        ValueError: not even `least` units fit.
    """
    smallest = draft(least)
    if smallest.tokens(tokenizer) > tokens:
        raise ValueError(
            f"task.length leaves {tokens} tokens to context and question, and {smallest.tokens(tokenizer)} are the least: "
            "take a larger task.length"
        )
    fits, step = least, 1
    # Doubling until it is too much, then halving down to the unit.
    while most is None or fits < most:
        larger = fits + step if most is None else min(fits + step, most)
        if draft(larger).tokens(tokenizer) > tokens:
            break
        fits, step = larger, 2 * step
    while step:
        larger = fits + step
        if (most is None or larger <= most) and draft(larger).tokens(tokenizer) <= tokens:
            fits = larger
        step //= 2
    return draft(fits)


class Pool:
    """Items of an endless iterator, drawn when first needed and kept."""

    def __init__(self, items: Iterator[str]):
        self._items = items
        self._drawn: list[str] = []

    def first(self, count: int) -> list[str]:
        """A new list of the first `count` items."""
        while len(self._drawn) < count:
            self._drawn.append(next(self._items))
        return self._drawn[:count]


def book_sentences(path: str, option: str) -> list[str]:
    """Sentences of a text file, line breaks inside them removed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, or without a sentence.
    """
    found = _SENTENCE.findall(" ".join(read_text(Path(path), option).split()))
    if not found:
        raise ValueError(f"{option}={path} holds no text")
    return found


def background(rng: random.Random, book: list[str] | None) -> Iterator[str]:
    """Endless sentences: of the book from a drawn one on, beginning anew at its end; of generated prose without a book."""
    if book is None:
        yield from sentences(rng)
        return
    place = rng.randrange(len(book))
    while True:
        yield book[place]
        place = (place + 1) % len(book)


def scattered(rng: random.Random, texts: list[str], filler: list[str]) -> list[str]:
    """`texts` in their order at drawn places among `filler`; the order of places depends on `rng` alone, not on lengths."""
    depths = sorted(rng.random() for _ in texts)
    mixed = list(filler)
    # Later ones first, so that the places of the earlier ones stay what they are.
    for text, depth in reversed(list(zip(texts, depths))):
        mixed.insert(round(depth * len(filler)), text)
    return mixed


@dataclass(frozen=True, kw_only=True)
class Generated(Records):
    """Samples made by a seeded generator: sample i depends on the options, the seed and i alone."""

    num_samples: int | None = 10
    prefill_tokens: int | None = 512
    chat: bool = False
    grader: str = "contains_all"
    max_new_tokens: int = 32
    seed: int = 42

    # Options that say how large a text gets: its tokens, or things in it of a token each at the least.
    sizes: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "task", dict.fromkeys(self.sizes, 1))
        if self.num_samples is None and self.endless:
            raise ValueError("task.num_samples=null: samples are generated without end, give a number")

    @property
    def endless(self) -> bool:
        """Whether there is no last sample."""
        return True

    @property
    def label(self) -> str:
        """First part of the samples' names, and of the seed of each, e.g. "key_values"."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def make(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase) -> Record:
        """The record of sample `index`.

        Raises:
            ValueError: the options leave no room for it.
        """

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Records.samples`.

        Raises:
            ValueError: moreover, a size that exceeds `max_positions`.
        """
        for option in self.sizes if self.stored() is None else ():
            self.require_positions(option, max_positions)
        yield from super().samples(tokenizer, max_positions)

    def records(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[Found]:
        """See `Records.records`."""
        for index in range(self.num_samples):
            rng = random.Random(f"{self.label}:{self.seed}:{index}")
            yield f"{self.label} sample {index}", f"{self.label}-{index:04d}", self.make(rng, index, tokenizer)

    def stored(self) -> Iterator[Found] | None:
        """See `Records.stored`."""
        return None

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        context, question = (text_field(record, name, where) for name in ("context", "question"))
        return self.asked(context, question, gold_field(record, "outputs", None, where), record["meta"])

    def _source(self) -> str:
        return f"task={self.label}"


@dataclass(frozen=True, kw_only=True)
class GeneratedOrRead(Generated):
    """A generator for records that also exist as files.

    Args:
        path: file of such records, read instead of generating; `num_samples` is then how many of them.
    """

    path: str | None = None

    @property
    def endless(self) -> bool:
        """See `Generated.endless`."""
        return self.path is None

    def records(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[Found]:
        """See `Records.records`."""
        return super().records(tokenizer) if self.path is None else self.stored()

    def stored(self) -> Iterator[Found] | None:
        """See `Records.stored`."""
        return None if self.path is None else file_records(Path(self.path))

    def _source(self) -> str:
        return super()._source() if self.path is None else f"task.path={self.path}"
