"""One needle at every depth of documents of every length: the cells of a heat map (Kamradt 2023)."""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_least
from kvstitch.evaluation.tasks import vocabulary
from kvstitch.evaluation.tasks.generated import Draft, Generated, Pool, background, book_sentences, longest
from kvstitch.evaluation.tasks.sources import Record


@dataclass(frozen=True, kw_only=True)
class NeedleGrid(Generated):
    """Lengths from `min_length` to `max_length` and depths from 0 to 1, both evenly spaced, ends included.

    A sample's `meta` has `length`, `depth` (where the needle was wanted), `placed` (where a sentence ended) and `tokens`.

    Args:
        min_length: most tokens of context, question and answer of the shortest documents, filled to within a sentence.
        max_length: of the longest.
        num_lengths: columns of the map; 1: `max_length` alone.
        num_depths: rows of the map; 1: the middle alone.
        samples_per_cell: documents for each length and depth.
        book_path: text file that is the haystack; `None`: generated prose.
    """

    min_length: int = 1024
    max_length: int = 4096
    num_lengths: int = 4
    num_depths: int = 5
    samples_per_cell: int = 1
    book_path: str | None = None
    num_samples: int | None = None
    grader: str = "first_number"
    max_new_tokens: int = 16

    sizes: ClassVar[tuple[str, ...]] = ("max_length",)

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "task", dict.fromkeys(("min_length", "num_lengths", "num_depths", "samples_per_cell"), 1))
        if self.max_length < self.min_length:
            raise ValueError(f"task.max_length={self.max_length} is below task.min_length={self.min_length}")
        cells = self.num_lengths * self.num_depths * self.samples_per_cell
        if self.num_samples is None:
            object.__setattr__(self, "num_samples", cells)
        elif self.num_samples > cells:
            raise ValueError(f"task.num_samples={self.num_samples}: the grid has {cells}")

    @property
    def endless(self) -> bool:
        """See `Generated.endless`."""
        return False

    def make(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase) -> Record:
        """See `Generated.make`."""
        cell = index // self.samples_per_cell
        length = _spaced(self.min_length, self.max_length, self.num_lengths, cell // self.num_depths)
        depth = _spaced(0.0, 1.0, self.num_depths, cell % self.num_depths) if self.num_depths > 1 else 0.5
        length, depth = round(length), round(depth, 4)
        name, value = next(vocabulary.names(rng)), vocabulary.number(rng, 5)
        filler = Pool(background(rng, self._book))
        subject = f"The code number of {name}"

        def draft(units: int) -> Draft:
            texts = filler.first(units)
            place = round(depth * units)
            texts.insert(place, f"{subject} is {value}.")
            context = "A fact is hidden in the text below. Remember it, for it will be asked for.\n\n" + " ".join(texts)
            question = f"\n\nQuestion: What is the code number of {name}?\nAnswer: {subject} is"
            meta = {"length": length, "depth": depth, "placed": round(place / max(units, 1), 4)}
            return Draft(context, question, (value,), meta)

        return longest(draft, tokenizer, length - self.max_new_tokens, least=0).record(tokenizer)

    @cached_property
    def _book(self) -> list[str] | None:
        return None if self.book_path is None else book_sentences(self.book_path, "task.book_path")


def _spaced(first: float, last: float, count: int, index: int) -> float:
    return last if count == 1 else first + (last - first) * index / (count - 1)
