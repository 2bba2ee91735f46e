"""Graders of final answers in a box: the last complete \\boxed{...} of an answer counts, whatever came before it."""

import re
from collections.abc import Sequence

from kvstitch.evaluation.graders.equivalence import same_value
from kvstitch.evaluation.graders.words import gold_values, numbers

_BOX = re.compile(r"\\f?boxed\s*\{")
# How LaTeX sets thousands apart; dropped so that "2{,}125" and "2,\!125" are the number 2125.
_THIN_SPACE = re.compile(r"\{,\}\s*|,?\\[!,;: ]")
_SPELLINGS = (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", ""), ("$", ""), ("\\ ", ""))
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")


def last_box(text: str) -> str | None:
    """What stands in the last complete box, `None` if there is none; a box that the end of the answer cut is no box."""
    for start in reversed([found.end() for found in _BOX.finditer(text)]):
        depth = 1
        for place in range(start, len(text)):
            if text[place] in "{}" and text[place - 1] != "\\":
                depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[start:place].strip()
    return None


def boxed_integer(prediction: str, gold: Sequence[str]) -> float:
    """1 if the last box holds exactly one number and it has the value of one of `gold` (AIME: 070 is 70, 711 is not 11)."""
    box = last_box(prediction)
    values = gold_values(gold)
    found = numbers(_plain(box)) if box is not None else []
    return float(len(found) == 1 and found[0] in values)


def final_number(prediction: str, gold: Sequence[str]) -> float:
    """Like `boxed_integer` where there is a box, else 1 if the last number of the answer is one of `gold` (GSM8K)."""
    if last_box(prediction) is not None:
        return boxed_integer(prediction, gold)
    found = numbers(prediction)
    values = gold_values(gold)
    return float(bool(found) and found[-1] in values)


def boxed_math(prediction: str, gold: Sequence[str]) -> float:
    """1 if the last box is mathematically equal to one of `gold`: fractions, roots, sets, intervals, units, percent.

    Equal spellings are settled here; the rest goes to math-verify in a process of its own, see
    `kvstitch.evaluation.graders.equivalence`.

    Raises:
        ImportError: math-verify is not installed.
    """
    box = last_box(prediction)
    if box is None:
        return 0.0
    answer = _plain(box)
    wanted = [_plain(last_box(one) or one) for one in gold]
    if any(_squeezed(answer) == _squeezed(one) for one in wanted):
        return 1.0
    return float(any(same_value(answer, one) for one in wanted))


def _plain(latex: str) -> str:
    text = _THIN_SPACE.sub("", latex)
    for spelling, usual in _SPELLINGS:
        text = text.replace(spelling, usual)
    return text.strip().rstrip(".").strip()


def _squeezed(latex: str) -> str:
    return re.sub(r"\s+", "", _TEXT.sub(r"\1", latex)).casefold()
