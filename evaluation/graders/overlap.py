"""Graders that measure how much of the wanted text an answer shares: token F1, ROUGE-L, edit similarity."""

import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence

from kvstitch.evaluation.graders.words import first_line

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_COMMENT = ("`", "#", "//")


def longest_common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, bit-parallel over `first` (Hyyrö 2004).

    One addition of integers with a bit for each item of `first` for each item of `second`.
    """
    places: dict[Hashable, int] = {}
    for index, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << index
    everything = (1 << len(first)) - 1
    row = everything
    for item in second:
        matches = row & places.get(item, 0)
        row = (row + matches | row - matches) & everything
    return len(first) - row.bit_count()


def token_f1(prediction: str, gold: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, best gold (SQuAD, arXiv 1606.05250; LongBench's QA score).

    Case, punctuation and articles do not count.
    """
    words = _answer_words(prediction)
    return max(_f1(sum((Counter(words) & Counter(wanted)).values()), len(words), len(wanted))
               for wanted in map(_answer_words, gold))  # fmt: skip


def token_f1_first_line(prediction: str, gold: Sequence[str]) -> float:
    """`token_f1` of the answer's first line; for prompts with worked examples, which a model goes on with (LongBench)."""
    return token_f1(first_line(prediction), gold)


def rouge_l(prediction: str, gold: Sequence[str]) -> float:
    """ROUGE-L F1: longest common subsequence of words, best gold (Lin 2004), over the text as a whole.

    Words are runs of letters and digits in lower case. Packages that go sentence by sentence give slightly other values.
    """
    words = re.findall(r"\w+", prediction.lower())
    wanted_words = [re.findall(r"\w+", wanted.lower()) for wanted in gold]
    return max(_f1(longest_common_subsequence(words, wanted), len(words), len(wanted)) for wanted in wanted_words)


def rouge_l_first_line(prediction: str, gold: Sequence[str]) -> float:
    """`rouge_l` of the answer's first line; for prompts with worked examples, which a model goes on with (LongBench)."""
    return rouge_l(first_line(prediction), gold)


def edit_similarity(prediction: str, gold: Sequence[str]) -> float:
    """1 minus insertions and deletions over the summed lengths in characters, best gold; 1 if equal.

    What fuzzy string packages call the ratio, unrounded. White space at both ends does not count.
    """
    text = prediction.strip()
    return max(_f1(longest_common_subsequence(text, wanted), len(text), len(wanted))
               for wanted in map(str.strip, gold))  # fmt: skip


def code_similarity(prediction: str, gold: Sequence[str]) -> float:
    """Edit similarity of the answer's first line of code (LongBench's LCC and RepoBench-P, arXiv 2308.14508)."""
    return edit_similarity(_code_line(prediction), gold)


def code_line(prediction: str, gold: Sequence[str]) -> float:
    """1 if the answer's first line of code is one of `gold`, but for white space (RepoBench, arXiv 2306.03091)."""
    line = " ".join(_code_line(prediction).split())
    return float(any(line == " ".join(wanted.split()) for wanted in gold))


def _code_line(text: str) -> str:
    """The first line that is neither blank, nor a comment, nor a fence; LongBench knows them by these characters."""
    for line in text.split("\n"):
        if line.strip() and not any(mark in line for mark in _COMMENT):
            return line
    return ""


def _answer_words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(common: int, first: int, second: int) -> float:
    """Of `common` items in two sequences; two empty ones are equal."""
    return 2 * common / (first + second) if first + second else 1.0
