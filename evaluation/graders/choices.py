"""Graders of answers that are one out of a few: the letter of a choice, a class, a label."""

import re
from collections.abc import Sequence

from kvstitch.evaluation.graders.boxes import last_box
from kvstitch.evaluation.graders.words import first_line, normalise, stands_in

# Capitals only: "the answer is a dog" states no choice.
_STATED = re.compile(
    r"(?i:\b(?:answer|choice|option)\b(?:\s+(?:is|would\s+be)\s*:?|\s*:)(?:\s*(?:choice|option))?)\s*\(?([A-Z])\b"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathbf|mathrm)\s*\{([^{}]*)\}")
# "(B) text" or "B. text", but not several choices.
_BOXED = re.compile(r"\(([A-Z])\)(?!.*\([A-Z]\))|([A-Z])(?=[.):])(?!..*\b[A-Z][.):])", re.DOTALL)
# A letter that is the whole line, or is set off from the words after it: "B", "(B)", "B. Because", but not "A dog".
_LEADING = re.compile(r"\(([A-Z])\)|([A-Z])(?=$|[.):,])")


def choice_letter(prediction: str, gold: Sequence[str]) -> float:
    """1 if the chosen letter is one of `gold`.

    The letter is the last box's, also with the choice's text after it ("(B) the second"), else that of the first "the answer is
    (B)" (LongBench v2, arXiv 2412.15204), else the one that the answer begins with. Text that only contains the letter chooses
    nothing.
    """
    # A model that loops on blanks must not hold up the matching.
    chosen = _chosen(" ".join(prediction.replace("*", "").split()))
    return float(chosen is not None and chosen in {wanted.strip().strip("().").upper() for wanted in gold})


def _chosen(text: str) -> str | None:
    box = last_box(text)
    if box is not None:
        bare = _TEXT.sub(r"\1", box).strip()
        inside = re.fullmatch(r"\(?([A-Za-z])\)?\.?", bare) or _BOXED.match(bare)
        return "".join(filter(None, inside.groups())).upper() if inside else None
    stated = _STATED.search(text)
    if stated:
        return stated.group(1)
    leading = _LEADING.match(text)
    return (leading.group(1) or leading.group(2)) if leading else None


def class_label(prediction: str, gold: Sequence[str]) -> float:
    """Classification with credit shared among the classes named on the first line (LongBench's TREC, arXiv 2308.14508).

    Args:
        gold: the right class first, then every other class.
    """
    line = first_line(prediction)
    named = [label for label in dict.fromkeys(gold) if stands_in(line, label)]
    # "city" inside the right "other city" is no second answer.
    named = [label for label in named if label == gold[0] or not stands_in(gold[0], label)]
    return 1 / len(named) if gold[0] in named else 0.0


def only_label(prediction: str, gold: Sequence[str]) -> float:
    """1 if the right label, and none of the others, is named in the answer's first sentence (BABILong, arXiv 2406.10149).

    Args:
        gold: the right label first, then the others that must not be named.
    """
    sentence = re.split(r"[.\n]", prediction.strip(), maxsplit=1)[0]
    others = {normalise(label) for label in gold[1:]} - {normalise(gold[0])}
    return float(stands_in(sentence, gold[0]) and not any(stands_in(sentence, label) for label in others))
