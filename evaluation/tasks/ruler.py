"""RULER (arXiv 2404.06654): its thirteen tasks generated here, or read from files of its own generator."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_types
from kvstitch.evaluation.tasks import ruler_recipes as recipes
from kvstitch.evaluation.tasks.encoding import Ask
from kvstitch.evaluation.tasks.fields import gold_field, text_field
from kvstitch.evaluation.tasks.generated import GeneratedOrRead, book_sentences, longest
from kvstitch.evaluation.tasks.records import Parts
from kvstitch.evaluation.tasks.sources import Record, read_text, settled_name

# Most tokens of an answer, as RULER sets them.
ANSWER_TOKENS = dict.fromkeys(recipes.NEEDLES, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@dataclass(frozen=True, kw_only=True)
class Ruler(GeneratedOrRead):
    """One of RULER's tasks; grader and number of new tokens are its own unless they are given.

    Args:
        kind: a key of `ANSWER_TOKENS`; `None`: what the file of `path` is called, or "niah_single_1" without one.
        length: most tokens of context, question and answer together, filled to within a unit: a sentence, a word, a
            document.
        source_path: for the kinds with an essay, a text file; `None`: generated prose. For qa_1 a JSON file of SQuAD, for
            qa_2 one of HotpotQA.
        path: a JSON Lines file with `input` and `outputs`, read instead.
    """

    kind: str | None = None
    length: int = 4096
    source_path: str | None = None
    grader: str | None = None
    max_new_tokens: int | None = None

    facts: ClassVar[tuple[str, ...]] = ("index", "length")
    sizes: ClassVar[tuple[str, ...]] = ("length",)

    def __post_init__(self):
        check_types(self, "task")
        kind = settled_name(self, "kind", "niah_single_1", ANSWER_TOKENS)
        object.__setattr__(self, "kind", kind)
        own = {
            "grader": "contains_any" if kind.startswith("qa") else "contains_all",
            "max_new_tokens": ANSWER_TOKENS[kind],
        }
        for name, value in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()
        if kind.startswith("qa") and self.path is None and self.source_path is None:
            what = "SQuAD" if kind == "qa_1" else "HotpotQA"
            raise ValueError(
                f"task.kind={kind} needs task.source_path=<JSON file of {what}>, or task.path=<RULER file>"
            )

    @property
    def label(self) -> str:
        """See `Generated.label`."""
        return self.kind

    def make(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase) -> Record:
        """See `Generated.make`."""
        recipe = self._recipe(rng, index)
        tokens = self.length - self.max_new_tokens
        record = longest(recipe.draft, tokenizer, tokens, recipe.least, recipe.most).record(tokenizer)
        record["meta"]["length"] = self.length
        return record

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        if self.path is None:
            return super().parts(record, where)
        # SQuAD's several annotators often say the same.
        gold = tuple(dict.fromkeys(gold_field(record, "outputs", None, where)))
        return Parts(text_field(record, "input", where), asks=(Ask("", gold),))

    def _recipe(self, rng: random.Random, index: int) -> recipes.Recipe:
        if self.kind in recipes.NEEDLES:
            return recipes.needles(rng, recipes.NEEDLES[self.kind], self._book)
        if self.kind == "vt":
            return recipes.variable_tracking(rng)
        if self.kind == "cwe":
            return recipes.common_words(rng)
        if self.kind == "fwe":
            return recipes.frequent_words(rng)
        questions, texts = self._questions
        # Questions in a drawn order that all samples share, so that none comes twice before all have come.
        order = random.Random(f"{self.kind}:{self.seed}").sample(range(len(questions)), len(questions))
        question, answers, needed = questions[order[index % len(order)]]
        return recipes.documents(rng, question, answers, needed, texts)

    @cached_property
    def _book(self) -> list[str] | None:
        return None if self.source_path is None else book_sentences(self.source_path, "task.source_path")

    @cached_property
    def _questions(self) -> tuple[list[tuple[str, tuple[str, ...], list[str]]], list[str]]:
        content = read_text(Path(self.source_path), "task.source_path")
        try:
            data = json.loads(content)
            found = list(_squad(data) if self.kind == "qa_1" else _hotpot(data))
        except (ValueError, KeyError, TypeError) as error:
            what = "SQuAD" if self.kind == "qa_1" else "HotpotQA"
            raise ValueError(f"task.source_path={self.source_path} has not the form of {what}: {error!r}") from error
        if not found:
            raise ValueError(f"task.source_path={self.source_path} holds no question with an answer")
        texts = dict.fromkeys(text for _, _, _, about in found for text in about)
        return [(question, answers, needed) for question, answers, needed, _ in found], list(texts)


def _squad(data: Any) -> Iterator[tuple[str, tuple[str, ...], list[str], list[str]]]:
    """Question, answers, the paragraph that holds them, and the same as all that the record adds to the pool."""
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            text = paragraph["context"]
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers:
                    yield asked["question"], answers, [text], [text]


def _hotpot(data: Any) -> Iterator[tuple[str, tuple[str, ...], list[str], list[str]]]:
    """Question, answer, the paragraphs named by the supporting facts, and all ten paragraphs."""
    for record in data:
        texts = {title: f"{title}\n{''.join(sentences)}" for title, sentences in record["context"]}
        needed = list(dict.fromkeys(texts[title] for title, _ in record["supporting_facts"]))
        yield record["question"], (record["answer"],), needed, list(texts.values())
