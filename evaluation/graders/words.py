"""Graders of numbers, words and phrases. They compare whole ones, never a prefix, suffix or substring."""

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

# A sign counts only where no word or number stands before it: "x = -5" is minus five, "417-35" holds 417 and 35.
_NUMBER = re.compile(r"(?<![\w.])(?:(?<!\w)[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_WORD = re.compile(r"\w+(?:[-'.]\w+)*")


def numbers(text: str) -> list[Decimal]:
    """Every number in the text, in order; thousands commas are read, digits inside a word such as "x12" are not."""
    return [Decimal(match.replace(",", "")) for match in _NUMBER.findall(normalise(text).replace("−", "-"))]


def normalise(text: str) -> str:
    """Unicode forms, case and white space made one."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def first_line(text: str) -> str:
    """The first line that is not blank; a base model goes on with questions of its own after it."""
    return text.lstrip().split("\n")[0]


def gold_values(gold: Sequence[str]) -> list[Decimal]:
    """The value of each gold.

    Raises:
        ValueError: a gold that is not exactly one number, as no number could answer it.
    """
    values = []
    for wanted in gold:
        found = numbers(wanted)
        if len(found) != 1:
            raise ValueError(f"gold {wanted!r} holds {len(found)} numbers, a number grader needs exactly one")
        values.append(found[0])
    return values


def exact(prediction: str, gold: Sequence[str]) -> float:
    """1 if the whole answer equals one of `gold`, but for case and white space."""
    answer = normalise(prediction)
    return float(any(answer == normalise(wanted) for wanted in gold))


def first_number(prediction: str, gold: Sequence[str]) -> float:
    """1 if the first number of the answer has the value of one of `gold`."""
    found = numbers(prediction)
    values = gold_values(gold)
    return float(bool(found) and found[0] in values)


def last_number(prediction: str, gold: Sequence[str]) -> float:
    """1 if the last number of the answer has the value of one of `gold`; for worked solutions that end in the result."""
    found = numbers(prediction)
    values = gold_values(gold)
    return float(bool(found) and found[-1] in values)


def number_list(prediction: str, gold: Sequence[str]) -> float:
    """1 if the numbers of the answer's first line are those of one of `gold`, in the same order, all of them."""
    found = numbers(first_line(prediction))
    return float(any(found == numbers(wanted) for wanted in gold))


def number_share(prediction: str, gold: Sequence[str]) -> float:
    """Share of the answer's numbers that have the value of the gold's only one, 0 without numbers.

    LongBench's score for the number of a passage ("Paragraph 12") and for counting (arXiv 2308.14508): who names several
    gets part of a point. The best of several golds counts.
    """
    found = numbers(prediction)
    return max(found.count(value) / len(found) if found else 0.0 for value in gold_values(gold))


def first_word(prediction: str, gold: Sequence[str]) -> float:
    """1 if the first word (or identifier) of the answer is spelled like one of `gold`, but for case."""
    found = _WORD.search(normalise(prediction))
    return float(found is not None and any(found.group() == normalise(wanted) for wanted in gold))


def contains_any(prediction: str, gold: Sequence[str]) -> float:
    """1 if one of `gold` stands in the answer as whole words (RULER's question answering, arXiv 2404.06654)."""
    return float(any(stands_in(prediction, wanted) for wanted in gold))


def contains_all(prediction: str, gold: Sequence[str]) -> float:
    """Share of `gold` that stands in the answer as whole words (RULER's recall, arXiv 2404.06654)."""
    return sum(stands_in(prediction, wanted) for wanted in gold) / len(gold)


def stands_in(prediction: str, wanted: str) -> bool:
    """Whether `wanted` occurs with no letter or digit next to it, nor as part of a longer decimal number."""
    pattern = r"(?<!\w)(?<!\d[.,])" + re.escape(normalise(wanted)) + r"(?!\w)(?![.,]\d)"
    return re.search(pattern, normalise(prediction)) is not None
