"""BABILong (arXiv 2406.10149): facts of a bAbI story scattered over a book, and the story's question."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_least
from kvstitch.evaluation.tasks.base import Sample
from kvstitch.evaluation.tasks.fields import gold_field, text_field
from kvstitch.evaluation.tasks.generated import Draft, Pool, background, book_sentences, longest
from kvstitch.evaluation.tasks.records import Parts, Records
from kvstitch.evaluation.tasks.sources import BadRecord, Found, Record, existing

_LINE = re.compile(r"(\d+) (.+)")


@dataclass(frozen=True)
class Story:
    """Facts in order, a question about them, its answer, and which of them it needs (indices into `facts`)."""

    facts: tuple[str, ...]
    question: str
    answer: str
    needed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BabiLong(Records):
    """Questions of a bAbI file in its order, their facts in order at drawn places among sentences of a book.

    A sample's `meta` has `depth`, the place of the latest fact that the answer needs.

    Args:
        path: a bAbI file, e.g. qa1_single-supporting-fact_test.txt.
        book_path: UTF-8 text of the background.
        length: most tokens of context, question and answer together, filled to within a sentence.
    """

    path: str
    book_path: str
    length: int = 4096
    num_samples: int | None = 10
    prefill_tokens: int | None = 512
    chat: bool = False
    grader: str = "only_label"
    max_new_tokens: int = 16
    seed: int = 42

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "task", {"length": 1})

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Records.samples`.

        Raises:
            ValueError: moreover, `length` exceeds `max_positions`.
        """
        self.require_positions("length", max_positions)
        yield from super().samples(tokenizer, max_positions)

    def records(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[Found]:
        """See `Records.records`."""
        path = existing(Path(self.path))
        labels = sorted({story.answer for _, story in stories(path) if isinstance(story, Story)})
        book = book_sentences(self.book_path, "task.book_path")
        for line, story in stories(path):
            where, name = f"{path}:{line}", f"{path.stem}-{line:06d}"
            if isinstance(story, BadRecord):
                yield where, name, story
            else:
                rng = random.Random(f"babilong:{self.seed}:{path.stem}:{line}")
                yield where, name, self._mixed(rng, story, labels, book, tokenizer)

    def stored(self) -> Iterator[Found]:
        """See `Records.stored`; the stories alone, without the book around them."""
        path = existing(Path(self.path))
        for line, story in stories(path):
            alone = story
            if isinstance(story, Story):
                alone = {"context": "", "question": story.question, "outputs": [story.answer], "meta": {}}
            yield f"{path}:{line}", f"{path.stem}-{line:06d}", alone

    def _mixed(
        self, rng: random.Random, story: Story, labels: list[str], book: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> Record:
        filler = Pool(background(rng, book))
        depths = sorted(rng.random() for _ in story.facts)
        # A label that the question names, such as the person asked about, may come back in an answer.
        others = [label for label in labels if label != story.answer and label.lower() not in story.question.lower()]
        latest = max(story.needed)

        def draft(units: int) -> Draft:
            texts = filler.first(units)
            for fact, depth in reversed(list(zip(story.facts, depths))):
                texts.insert(round(depth * units), fact)
            context = (
                "Facts about some people are scattered over the text below. Remember them, for a question about them "
                "follows.\n\n" + " ".join(texts)
            )
            question = f"\n\nAnswer with one word.\nQuestion: {story.question}\nAnswer:"
            meta = {"depth": round(depths[latest], 4), "length": self.length, "facts": len(story.facts)}
            return Draft(context, question, (story.answer, *others), meta)

        return longest(draft, tokenizer, self.length - self.max_new_tokens, least=0).record(tokenizer)

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        context, question = (text_field(record, name, where) for name in ("context", "question"))
        return self.asked(context, question, gold_field(record, "outputs", None, where), record["meta"])

    def _source(self) -> str:
        return f"task.path={self.path}"


def stories(path: Path) -> Iterator[tuple[int, Story | BadRecord]]:
    """The line of each question in a bAbI file and its story so far; a line that breaks the form is a bad record.

    Facts are "<number> <text>", questions "<number> <text>\\t<answer>\\t<numbers of facts>"; the number 1 begins a story.
    """
    facts: dict[int, str] = {}
    for line, raw in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = _LINE.fullmatch(raw.decode("utf-8").rstrip())
        except UnicodeDecodeError as error:
            yield line, BadRecord(f"{path}:{line}: not UTF-8: {error.reason} at byte {error.start} of the line")
            continue
        if found is None:
            yield line, BadRecord(f"{path}:{line}: must begin with a number and a text, got {raw[:60]!r}")
            continue
        number, text = int(found.group(1)), found.group(2)
        if number == 1:
            facts = {}
        if "\t" in text:
            yield line, _story(facts, text, f"{path}:{line}")
        else:
            facts[number] = text.strip()


def _story(facts: dict[int, str], text: str, where: str) -> Story | BadRecord:
    fields = text.split("\t")
    if len(fields) != 3 or not fields[1].strip() or not fields[2].split():
        return BadRecord(f"{where}: a question must have an answer and the numbers of its facts, separated by tabs")
    numbers = list(facts)
    needed = [numbers.index(int(one)) for one in fields[2].split() if one.isdecimal() and int(one) in facts]
    if len(needed) != len(fields[2].split()):
        return BadRecord(f"{where}: the story has no facts {fields[2].strip()}")
    return Story(tuple(facts.values()), fields[0].strip(), fields[1].strip(), tuple(needed))
