"""Overlap with the wanted text, against definitions written out and values counted by hand."""

import random
from difflib import SequenceMatcher

import pytest

from kvstitch.evaluation.graders.overlap import longest_common_subsequence
from kvstitch.evaluation.grading import grade


def by_table(first, second):
    row = [0] * (len(second) + 1)
    for item in first:
        before = row
        row = [0]
        for index, other in enumerate(second):
            row.append(before[index] + 1 if item == other else max(before[index + 1], row[-1]))
    return row[-1]


def test_longest_common_subsequence_against_the_table():
    rng = random.Random(3)
    for _ in range(200):
        first, second = ([rng.choice("abcd") for _ in range(rng.randrange(12))] for _ in range(2))
        assert longest_common_subsequence(first, second) == by_table(first, second)


@pytest.mark.parametrize(
    ("grader", "prediction", "gold", "score"),
    [
        # Two of three words right, two of two wanted found: 2 * 2 / (3 + 2).
        ("token_f1", "in Paris, France", ("Paris France",), 0.8),
        ("token_f1", "The cat!", ("a cat",), 1.0),
        ("token_f1", "cat", ("dog", "the cat sat"), 2 / 3),
        ("token_f1", "711", ("11",), 0.0),
        ("token_f1", "", ("cat",), 0.0),
        ("token_f1", "Paris\nQuestion: more", ("Paris",), 0.5),
        ("token_f1_first_line", "\nParis\nQuestion: more", ("Paris",), 1.0),
        # a b d of "a b c d" and "a x b d": 2 * 3 / 8.
        ("rouge_l", "A b, c d.", ("a x b d",), 0.75),
        ("rouge_l", "d c b a", ("a b c d",), 0.25),
        ("rouge_l", "", ("a",), 0.0),
        ("rouge_l_first_line", "a b\nc d", ("a b",), 1.0),
        ("edit_similarity", "return x", ("return x ",), 1.0),
        ("edit_similarity", "abcd", ("abxd",), 0.75),
        ("edit_similarity", "", ("abc",), 0.0),
        ("code_similarity", "# first\n```python\n    return x\nmore", ("return x",), 1.0),
        ("code_similarity", "// only a comment", ("return x",), 0.0),
        ("code_line", "\n\n  return  x\nreturn y", ("return x",), 1.0),
        ("code_line", "return xy", ("return x",), 0.0),
        ("number_share", "Paragraph 12", ("Paragraph 12",), 1.0),
        ("number_share", "Paragraph 12 or 3", ("Paragraph 12",), 0.5),
        ("number_share", "Paragraph 112", ("Paragraph 12",), 0.0),
        ("number_share", "none", ("7",), 0.0),
        ("number_list", "[0, 17, 6]\nthen 5", ("0 17 6",), 1.0),
        ("number_list", "0, 6, 17", ("0 17 6",), 0.0),
        ("number_list", "0, 17", ("0 17 6",), 0.0),
    ],
)
def test_score(grader, prediction, gold, score):
    assert grade(grader, prediction, gold) == pytest.approx(score)


def test_edit_similarity_is_what_fuzzy_packages_call_the_ratio_where_both_find_the_same_match():
    for first, second in (("def f(x):", "def g(x):"), ("self.a = b", "self.b = b"), ("x", "y")):
        wanted = SequenceMatcher(None, first, second, autojunk=False).ratio()
        assert grade("edit_similarity", first, (second,)) == pytest.approx(wanted)
