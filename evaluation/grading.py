"""Graders: an answer as decoded, and what was wanted, to a score in [0, 1].

Numbers and words are compared whole, never as a prefix, suffix or substring: 711 does not answer 11. Numbers are compared
by value (070 answers 70: both are the integer seventy), words and identifiers by spelling (070 does not).
"""

from collections.abc import Callable, Sequence

from kvstitch.evaluation.graders.boxes import boxed_integer, boxed_math, final_number
from kvstitch.evaluation.graders.choices import choice_letter, class_label, only_label
from kvstitch.evaluation.graders.equivalence import require_math_verify
from kvstitch.evaluation.graders.overlap import (
    code_line,
    code_similarity,
    edit_similarity,
    rouge_l,
    rouge_l_first_line,
    token_f1,
    token_f1_first_line,
)
from kvstitch.evaluation.graders.words import (
    contains_all,
    contains_any,
    exact,
    first_number,
    first_word,
    last_number,
    number_list,
    number_share,
    numbers,
)
from kvstitch.evaluation.options import check_choice

__all__ = ["GRADERS", "check_grader", "grade", "numbers"]

GRADERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    grader.__name__: grader
    for grader in (
        exact,
        first_number,
        last_number,
        number_list,
        number_share,
        first_word,
        contains_any,
        contains_all,
        boxed_math,
        boxed_integer,
        final_number,
        choice_letter,
        class_label,
        only_label,
        token_f1,
        token_f1_first_line,
        rouge_l,
        rouge_l_first_line,
        edit_similarity,
        code_similarity,
        code_line,
    )
}


def check_grader(name: str) -> None:
    """Raise unless `name` is a grader that can run here.

    Raises:
        ValueError: no such grader; the valid choices are named.
        ImportError: what it needs is not installed.
    """
    check_choice("task.grader", name, GRADERS)
    if name == boxed_math.__name__:
        require_math_verify()


def grade(name: str, prediction: str, gold: Sequence[str]) -> float:
    """Score of an answer by the grader called `name`.

    Args:
        prediction: the decoded answer, special tokens removed.
        gold: what is accepted (or, for `contains_all`, wanted; for `class_label` and `only_label` the right one first).

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
