"""Graders against the known traps: part of a number, leading zeros, several golds, signs, thousands."""

from decimal import Decimal

import pytest

from kvstitch.evaluation.grading import GRADERS, grade, numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it is 711.", ["711"]),
        ("070 and 0070", ["70", "70"]),
        ("1,234.50 but 12,34", ["1234.50", "12", "34"]),
        ("x = -5, then 417-35 and 3 - 2", ["-5", "417", "35", "3", "2"]),
        ("x12 A711 node_3", []),
        ("\u22127 and +8", ["-7", "8"]),
        (".25 of 0.5", ["0.25", "0.5"]),
        ("5km, $3, 12th", ["5", "3", "12"]),
        ("none", []),
    ],
)
def test_numbers_in_text(text, found):
    assert numbers(text) == [Decimal(value) for value in found]


@pytest.mark.parametrize(
    ("grader", "prediction", "gold", "score"),
    [
        # Part of a number never answers for the whole, in either direction.
        ("first_number", " 711 crates", ("11",), 0.0),
        ("first_number", " 11", ("711",), 0.0),
        ("contains_any", "it is 711", ("11",), 0.0),
        ("contains_any", "it is 11.5", ("11",), 0.0),
        ("contains_any", "it is 11,500", ("11",), 0.0),
        ("contains_any", "it is 11.", ("11",), 1.0),
        ("contains_all", "8711 and 11", ("711", "11"), 0.5),
        # As a number 070 is 70; as an identifier it is not.
        ("first_number", "070", ("70",), 1.0),
        ("first_number", "70", ("070",), 1.0),
        ("last_number", "so 1 + 69 = 70.0", ("70",), 1.0),
        ("first_word", "070", ("70",), 0.0),
        ("contains_any", "code 070", ("70",), 0.0),
        ("exact", "070", ("70",), 0.0),
        # Which number counts.
        ("first_number", "17, not 18", ("17",), 1.0),
        ("first_number", "not 18 but 17", ("17",), 0.0),
        ("last_number", "not 18 but 17", ("17",), 1.0),
        ("last_number", "1,234 in all", ("1234",), 1.0),
        ("first_number", "-17", ("17",), 0.0),
        ("first_number", "no idea", ("17",), 0.0),
        ("first_number", "", ("17",), 0.0),
        # Several golds: any of them, or a share of all.
        ("first_number", "18", ("17", "18"), 1.0),
        ("contains_any", "in Paris or Rome", ("Rome", "Berlin"), 1.0),
        ("contains_all", "rome, then PARIS", ("Paris", "Rome", "Berlin", "Oslo"), 0.5),
        ("contains_all", "none of them", ("Paris", "Rome"), 0.0),
        # Words are whole, whatever their case, spacing and punctuation.
        ("first_word", " Kitchen.\nNext", ("kitchen",), 1.0),
        ("first_word", "kitchens", ("kitchen",), 0.0),
        ("first_word", "the kitchen", ("kitchen",), 0.0),
        ("contains_any", "the  New\nYork office", ("new york",), 1.0),
        ("contains_any", "catalogue", ("cat",), 0.0),
        ("contains_any", "uuid ab-12-cd!", ("ab-12-cd",), 1.0),
        ("contains_any", "a+b (see)", ("a+b",), 1.0),
        ("exact", "  New   York ", ("new york",), 1.0),
        ("exact", "New York City", ("New York",), 0.0),
    ],
)
def test_score(grader, prediction, gold, score):
    assert grade(grader, prediction, gold) == score


def test_unknown_grader_names_the_nearest():
    with pytest.raises(ValueError, match=r"must be one of exact, .*got 'first_numbr'; did you mean 'first_number'\?"):
        grade("first_numbr", "1", ("1",))


@pytest.mark.parametrize("grader", GRADERS)
def test_gold_must_be_a_filled_sequence(grader):
    with pytest.raises(TypeError, match="got the string '17'"):
        grade(grader, "17", "17")
    with pytest.raises(ValueError, match="gold is empty"):
        grade(grader, "17", ())


@pytest.mark.parametrize("gold", ["seventeen", "17 of 18"])
def test_number_graders_refuse_a_gold_that_is_not_one_number(gold):
    with pytest.raises(ValueError, match="needs exactly one"):
        grade("first_number", "17", (gold,))
