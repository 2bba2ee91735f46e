"""Graders: an answer as decoded, and what was wanted, to a score in [0, 1].

Every grader compares whole numbers or whole words, never a prefix, suffix or substring: 711 does not answer 11. Numbers
are compared by value (070 answers 70: both are the integer seventy), words and identifiers by spelling (070 does not).
"""

import difflib
import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal

# A sign counts only where no word or number stands before it: "x = -5" is minus five, "417-35" holds 417 and 35.
_NUMBER = re.compile(r"(?<![\w.])(?:(?<!\w)[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_WORD = re.compile(r"\w+(?:[-'.]\w+)*")


def numbers(text: str) -> list[Decimal]:
    """Every number in the text, in order; thousands commas are read, digits inside a word such as "x12" are not."""
    return [Decimal(match.replace(",", "")) for match in _NUMBER.findall(_normalise(text).replace("−", "-"))]


def exact(prediction: str, gold: Sequence[str]) -> float:
    """1 if the whole answer equals one of `gold`, but for case and white space."""
    answer = _normalise(prediction)
    return float(any(answer == _normalise(wanted) for wanted in gold))


def first_number(prediction: str, gold: Sequence[str]) -> float:
    """1 if the first number of the answer has the value of one of `gold`."""
    found = numbers(prediction)
    return float(bool(found) and found[0] in _values(gold))


def last_number(prediction: str, gold: Sequence[str]) -> float:
    """1 if the last number of the answer has the value of one of `gold`; for worked solutions that end in the result."""
    found = numbers(prediction)
    return float(bool(found) and found[-1] in _values(gold))


def first_word(prediction: str, gold: Sequence[str]) -> float:
    """1 if the first word (or identifier) of the answer is spelled like one of `gold`, but for case."""
    found = _WORD.search(_normalise(prediction))
    return float(found is not None and any(found.group() == _normalise(wanted) for wanted in gold))


def contains_any(prediction: str, gold: Sequence[str]) -> float:
    """1 if one of `gold` stands in the answer as whole words (RULER's question answering, arXiv 2404.06654)."""
    return float(any(_stands_in(prediction, wanted) for wanted in gold))


def contains_all(prediction: str, gold: Sequence[str]) -> float:
    """Share of `gold` that stands in the answer as whole words (RULER's recall, arXiv 2404.06654)."""
    return sum(_stands_in(prediction, wanted) for wanted in gold) / len(gold)


GRADERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    grader.__name__: grader for grader in (exact, first_number, last_number, first_word, contains_any, contains_all)
}


def check_grader(name: str) -> None:
    """Raise ValueError, naming the valid choices, unless `name` is a grader."""
    if name not in GRADERS:
        nearest = difflib.get_close_matches(str(name), GRADERS, n=1, cutoff=0.3)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"task.grader must be one of {', '.join(GRADERS)}, got {name!r}{hint}")


def grade(name: str, prediction: str, gold: Sequence[str]) -> float:
    """Score of an answer by the grader called `name`.

    Args:
        prediction: the decoded answer, special tokens removed.
        gold: what is accepted (or, for `contains_all`, wanted).

    Raises:
        ValueError: no such grader, or nothing to compare with.
        TypeError: `gold` is one string, whose letters would be taken for answers.
    """
    check_grader(name)
    if isinstance(gold, str):
        raise TypeError(f"gold must be a sequence of strings, got the string {gold!r}")
    if not gold:
        raise ValueError("gold is empty: there is nothing to grade against")
    return GRADERS[name](prediction, gold)


def _normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _values(gold: Sequence[str]) -> set[Decimal]:
    """The value of each gold; a gold that is not exactly one number is refused, as no number could answer it."""
    values = set()
    for wanted in gold:
        found = numbers(wanted)
        if len(found) != 1:
            raise ValueError(f"gold {wanted!r} holds {len(found)} numbers, a number grader needs exactly one")
        values.add(found[0])
    return values


def _stands_in(prediction: str, wanted: str) -> bool:
    """Whether `wanted` occurs with no letter or digit next to it, nor as part of a longer decimal number."""
    pattern = r"(?<!\w)(?<!\d[.,])" + re.escape(_normalise(wanted)) + r"(?!\w)(?![.,]\d)"
    return re.search(pattern, _normalise(prediction)) is not None
