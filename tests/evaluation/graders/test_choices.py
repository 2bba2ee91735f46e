"""Letters, classes and labels: what chooses one, and what only mentions it."""

import pytest

from kvstitch.evaluation.grading import grade


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("The correct answer is (B).", 1.0),
        ("The correct answer is B", 1.0),
        ("**The correct answer is (B)**", 1.0),
        ("Answer: (B) because C is wrong", 1.0),
        ("the ANSWER is: B", 1.0),
        ("The answer is b", 0.0),
        ("(B) the second one", 1.0),
        ("B", 1.0),
        ("B. The second", 1.0),
        (r"Not (A). So \boxed{\text{B}}", 1.0),
        ("The correct answer is option (B).", 1.0),
        ("the answer is: Choice B", 1.0),
        ("The correct answer is not option (B)", 0.0),
        ("The answer is optional: B", 0.0),
        (r"\boxed{(B) the second}", 1.0),
        (r"\boxed{\textbf{(B)}\ 12}", 1.0),
        (r"\boxed{\text{B. The second}}", 1.0),
        (r"\boxed{b}", 1.0),
        ("use \\boxed I guess. The answer is (B)", 1.0),
        ("The answer is" + " \n" * 20000 + "(B)", 1.0),
        (r"\boxed B", 1.0),
        (r"\boxed{(C) not B}", 0.0),
        (r"\boxed{Because of B}", 0.0),
        (r"\boxed{B, C}", 0.0),
        (r"\boxed{(B) or (C)}", 0.0),
        (r"\boxed{B. or C.}", 0.0),
        ("The correct answer is (C).", 0.0),
        ("The correct answer is (C), not (B)", 0.0),
        ("Between B and C", 0.0),
        ("Because of this", 0.0),
        ("BC", 0.0),
        (r"The answer is (B), that is \boxed{C}", 0.0),
        ("", 0.0),
    ],
)
def test_choice_letter(prediction, score):
    assert grade("choice_letter", prediction, ("B",)) == score


def test_an_article_is_no_choice():
    assert grade("choice_letter", "A dog barks", ("A",)) == 0.0
    assert grade("choice_letter", "The answer is a dog", ("A",)) == 0.0
    assert grade("choice_letter", "A: a dog barks", ("(A)",)) == 1.0


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("City", 1.0),
        ("\n city\nType: State", 1.0),
        ("City or State", 0.5),
        ("State", 0.0),
        ("capacity", 0.0),
    ],
)
def test_class_label(prediction, score):
    assert grade("class_label", prediction, ("City", "State", "Other location")) == score


def test_a_class_inside_the_right_one_is_no_second_answer():
    assert grade("class_label", "Other location", ("Other location", "location")) == 1.0
    assert grade("class_label", "Other location", ("location", "Other location")) == 0.5


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("kitchen", 1.0),
        ("John is in the Kitchen. The garden is empty.", 1.0),
        ("kitchen\nWhere is Mary? garden", 1.0),
        ("kitchen or garden", 0.0),
        ("garden", 0.0),
        ("kitchens", 0.0),
    ],
)
def test_only_label(prediction, score):
    assert grade("only_label", prediction, ("kitchen", "garden", "hallway", "Kitchen")) == score
