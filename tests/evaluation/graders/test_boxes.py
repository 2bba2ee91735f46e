"""Boxed answers: which box counts, what is equal, and that a comparison without end does not hang the run."""

import importlib.util
import threading

import pytest

from kvstitch.evaluation.graders import boxes, equivalence
from kvstitch.evaluation.graders.boxes import last_box
from kvstitch.evaluation.grading import check_grader, grade

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{7}", "7"),
        (r"first \boxed{1}, no: \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed {5} and \fbox{6}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        # The end of the answer cut the second box: it is none.
        (r"\boxed{3} or rather \boxed{\frac{1}{", "3"),
        (r"\boxed{\frac{1", None),
        # One token without braces, as LaTeX frames it; of more than one it would frame the first alone.
        (r"$\boxed 4$", "4"),
        (r"\boxed{3}, no: \boxed4.", "4"),
        (r"\boxed B", "B"),
        (r"\boxed 42", None),
        (r"\boxed 4.5", None),
        (r"\boxed x^2", None),
        (r"\boxed and", None),
        (r"\boxed 4\frac12", None),
        (r"\boxed 4\,000", None),
        (r"\boxed 4 000", None),
        (r"\boxed 4+3", None),
        (r"\boxed 4 - 3", None),
        (r"\boxed 4:30", None),
        (r"\boxed{12}. I used \boxed x here", "12"),
        (r"\(\boxed 7\) it is", "7"),
        (r"\boxed{" * 4000 + "5", None),
        (r"\boxedB", None),
        (r"\boxed 4 or \boxed{5}", "5"),
        ("no box, 7", None),
    ],
)
def test_last_complete_box(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        (r"\boxed{070}", ("70",), 1.0),
        (r"\boxed{70}", ("070",), 1.0),
        (r"\boxed{711}", ("11",), 0.0),
        (r"\boxed{11}", ("711",), 0.0),
        (r"\boxed{1} then \boxed{204}", ("204",), 1.0),
        (r"\boxed{204} then \boxed{1}", ("204",), 0.0),
        (r"m+n = \boxed{m+n=25}", ("25",), 1.0),
        (r"\boxed{113^\circ}", ("113",), 1.0),
        (r"\boxed{25 \text{ cm}}", ("25",), 1.0),
        (r"\boxed{70 \text{ cm}^2}", ("70",), 1.0),
        (r"\boxed{70\,\mathrm{cm}^{3}}", ("70",), 1.0),
        (r"\boxed{70 \text{ cm}^2}", ("2",), 0.0),
        (r"\boxed{\text{70}}", ("70",), 1.0),
        (r"\boxed{\$70}", ("70",), 1.0),
        (r"\boxed{3\text{ or }7}", ("37",), 0.0),
        (r"\boxed{3\text{ or }7}", ("3",), 0.0),
        (r"\boxed{2^{10}}", ("2",), 0.0),
        (r"\boxed 4", ("4",), 1.0),
        (r"\boxed{-\text{USD}5}", ("-5",), 1.0),
        (r"\boxed{-\text{USD}5}", ("5",), 0.0),
        (r"\boxed{\frac{" + "3" * 5000 + "}{7}}", ("5",), 0.0),
        (r"\boxed{1/" + "3" * 5000 + "}", ("5",), 0.0),
        (r"\boxed{2{,}125}", ("2125",), 1.0),
        (r"\boxed{2,\!125}", ("2125",), 1.0),
        (r"\boxed{3, 7}", ("3",), 0.0),
        (r"\boxed{\frac{1}{2}}", ("1",), 0.0),
        ("the answer is 204", ("204",), 0.0),
        (r"\boxed{20", ("20",), 0.0),
        (r"\boxed{\text{none}}", ("20",), 0.0),
        (r"\boxed{12}", ("11", "12"), 1.0),
    ],
)
def test_boxed_integer(prediction, gold, score):
    assert grade("boxed_integer", prediction, gold) == score


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        (r"3 + 4 = \boxed{7}, as 7 < 9", ("7",), 1.0),
        ("3 + 4 = 7\n#### 7", ("7",), 1.0),
        ("she makes $1,018 in all.", ("1,018",), 1.0),
        (r"\boxed{3/4}", ("0.75",), 1.0),
        (r"\boxed{x = \frac{3}{4} \text{ cups}}", ("0.75",), 1.0),
        (r"\boxed{-\dfrac34}", ("-0.75",), 1.0),
        (r"\boxed{\frac{3}{4}}", ("0.7",), 0.0),
        (r"\boxed{3/0}", ("3",), 0.0),
        (r"\boxed{2 = 3/4}", ("0.75",), 0.0),
        (r"\boxed{3/4, 1}", ("0.75",), 0.0),
        (r"\boxed{\$1{,}018}", ("1,018",), 1.0),
        ("3 + 4 = 7, out of 9", ("7",), 0.0),
        ("", ("7",), 0.0),
    ],
)
def test_final_number(prediction, gold, score):
    assert grade("final_number", prediction, gold) == score


@needs_math_verify
@pytest.mark.parametrize(
    ("box", "gold", "score"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\dfrac12", r"\frac{1}{2}", 1.0),
        (r"\frac{2}{4}", r"\frac{1}{2}", 1.0),
        (r"\frac{1}{3}", r"\frac{1}{2}", 0.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"5 \text{ cm}", "5", 1.0),
        ("5", r"5\text{ inches}", 1.0),
        ("x = 5", "5", 1.0),
        ("10", r"10\%", 1.0),
        ("3,000", "3000", 1.0),
        ("36", r"\$36", 1.0),
        (r"\$18.90", "18.90", 1.0),
        ("32348", r"\$32,\!348", 1.0),
        (r"\$32,\!348", r"\$32,\!348", 1.0),
        (r"\$36", r"\$35", 0.0),
        (r"70 \text{ cm}^2", "70", 1.0),
        ("070", "70", 1.0),
        ("711", "11", 0.0),
        ("(2, 1)", "(1,2)", 0.0),
        ("3, 2", "2,3", 1.0),
        (r"\left[0, 1\right)", "[0,1)", 1.0),
        ("-q + p", "p - q", 1.0),
        (r"\text{(C)}", "(C)", 1.0),
        ("Evelyn", r"\text{Evelyn}", 1.0),
        (r"\text{Angela}", r"\text{Evelyn}", 0.0),
    ],
)
def test_boxed_math(box, gold, score):
    assert grade("boxed_math", f"Thus \\boxed{{{box}}}.", (gold,)) == score


@needs_math_verify
def test_boxed_math_takes_the_last_box_any_gold_and_no_bare_number():
    assert grade("boxed_math", r"\boxed{1}, then \boxed{\frac12}", ("7", "0.5")) == 1.0
    assert grade("boxed_math", r"\boxed{0.5}, then \boxed{1}", ("7", "0.5")) == 0.0
    assert grade("boxed_math", "it is 0.5", ("0.5",)) == 0.0
    assert grade("boxed_math", r"\boxed{5}", (r"so \boxed{5}",)) == 1.0


@needs_math_verify
def test_a_comparison_without_end_is_cut_off_in_any_thread(caplog):
    """SIGALRM is of no use in a thread, and pytest-timeout needs it: the bound must not be made of it."""
    checker = equivalence.Checker()
    verdicts = []

    def work():
        verdicts.append(checker.equal("9^{9^{9^{9}}}", "3", 1.0))
        verdicts.append(checker.equal(r"\frac{3}{6}", "0.5", 60.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(100)
    checker.stop()
    # The second question is answered by a fresh process.
    assert verdicts == [False, True] and "counted as wrong" in caplog.text


@needs_math_verify
def test_a_process_that_died_is_replaced(caplog):
    checker = equivalence.Checker()
    assert checker.equal("1+1", "2", 60.0)
    checker._process.kill()
    checker._process.wait()
    assert checker.equal("1+1", "2", 60.0)
    checker.stop()
    assert not caplog.text


def test_without_math_verify_the_task_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(equivalence.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"boxed_math needs math-verify: pip install -e '.\[math\]'"):
        check_grader("boxed_math")
    check_grader("boxed_integer")


def test_equal_spellings_need_no_process(monkeypatch):
    monkeypatch.setattr(boxes, "same_value", lambda answer, gold: pytest.fail("asked"))
    assert boxes.boxed_math(r"\boxed{\left( 3, \tfrac{\pi}{2} \right)}", (r"\left(3,\frac{\pi}{2}\right)",)) == 1.0
