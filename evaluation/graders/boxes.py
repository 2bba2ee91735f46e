"""Graders of final answers in a box: the last complete \\boxed{...} of an answer counts, whatever came before it."""

import re
from collections.abc import Sequence
from fractions import Fraction

from kvstitch.evaluation.graders.equivalence import same_value
from kvstitch.evaluation.graders.words import gold_values, numbers

_BOX = re.compile(r"\\f?boxed\s*\{")
# Without braces LaTeX frames one token: in "\boxed 42" the 4 alone, which nobody means. So only what ends there is a box.
_BARE_BOX = re.compile(r"\\f?boxed(?:\s*(?=\d)|\s+)([A-Za-z0-9])(?=[ \t]*(?:$|\n|[$;]|[.,](?!\d)|\\[)\]]))")
# How LaTeX sets thousands apart; dropped so that "2{,}125" and "2,\!125" are the number 2125.
_THIN_SPACE = re.compile(r"\{,\}\s*|,?\\[!,;: ]")
_SPELLINGS = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", ""), ("\\$", ""), ("$", ""), ("\\ ", "")
)  # fmt: skip
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
# Words and units with their power, such as "\text{ cm}^2"; words that hold a digit stay.
_UNIT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{[^{}\d]*\}(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?")
_SIGNED_UNIT = re.compile(r"-\s*" + _UNIT.pattern)
# Digits without end are no number that anybody wrote, and Python refuses to read them.
_FRACTION = re.compile(
    r"(-?)\s*(?:\\frac\s*(?:\{\s*(\d{1,99})\s*\}|(\d))\s*(?:\{\s*(\d{1,99})\s*\}|(\d))|(\d{1,99})\s*/\s*(\d{1,99}))"
)


def last_box(text: str) -> str | None:
    """What stands in the last complete box, `None` if there is none; a box that the end of the answer cut is no box.

    `\\boxed 4.` frames the 4, as in LaTeX; `\\boxed 42` is no box.
    """
    ends = _closing_braces(text)
    closed = [
        (found.start(), text[found.end() : ends[found.end() - 1]].strip())
        for found in _BOX.finditer(text)
        if found.end() - 1 in ends
    ]
    bare = [(found.start(), found[1]) for found in _BARE_BOX.finditer(text)]
    return max(closed + bare)[1] if closed or bare else None


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace is closed, for those that are."""
    open_braces: list[int] = []
    ends: dict[int, int] = {}
    for place, letter in enumerate(text):
        if letter not in "{}" or text[place - 1 : place] == "\\":
            continue
        if letter == "{":
            open_braces.append(place)
        elif open_braces:
            ends[open_braces.pop()] = place
    return ends


def boxed_integer(prediction: str, gold: Sequence[str]) -> float:
    """1 if the last box holds exactly one number, units aside, with the value of one of `gold` (070 is 70, 711 is not 11).

    A fraction of two numbers is one number.
    """
    box = last_box(prediction)
    values = gold_values(gold)
    return float(box is not None and _only_number(box) in [Fraction(value) for value in values])


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


def _only_number(latex: str) -> Fraction | None:
    """The value of the only number, or of the only fraction of two, `None` where there are more or none."""
    text = _UNIT.sub(" ", _SIGNED_UNIT.sub("-", _plain(latex))).strip()
    before, _, value = text.rpartition("=")
    fraction = _FRACTION.fullmatch(value.strip())
    if fraction is not None and not numbers(before):
        sign, *digits = fraction.groups()
        above, below = (int(part) for part in digits if part)
        return None if below == 0 else Fraction(-above if sign else above, below)
    found = numbers(text)
    return Fraction(found[0]) if len(found) == 1 else None


def _plain(latex: str) -> str:
    text = _THIN_SPACE.sub("", latex)
    for spelling, usual in _SPELLINGS:
        text = text.replace(spelling, usual)
    return text.strip().rstrip(".").strip()


def _squeezed(latex: str) -> str:
    return re.sub(r"\s+", "", _TEXT.sub(r"\1", latex)).casefold()
