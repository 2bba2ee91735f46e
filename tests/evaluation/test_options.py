"""What is accepted by annotation, what is refused, and how the message reads."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Optional

import pytest

from kvstitch.evaluation.options import check_choice, check_least, check_types


@dataclass(frozen=True)
class Options:
    switch: bool = True
    count: int = 3
    share: float = 0.5
    name: str = "a"
    most: int | None = None
    old: Optional[int] = None  # noqa: UP045
    either: int | str = 3
    listed: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"switch": False, "count": -1, "share": 1, "name": "", "most": 2, "old": 2},
        # Neither plain nor one kind alone: for others to check.
        {"either": 1.5, "listed": 5},
    ],
)
def test_what_the_annotation_says_is_accepted(values):
    check_types(Options(**values), "group")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"switch": 1}, "group.switch must be true or false, got 1"),
        ({"switch": "flase"}, "group.switch must be true or false, got 'flase'; did you mean 'false'?"),
        ({"count": "abc"}, "group.count must be a whole number, got 'abc'"),
        ({"count": True}, "group.count must be a whole number, got True"),
        ({"count": 2.0}, "group.count must be a whole number, got 2.0"),
        ({"count": None}, "group.count must be a whole number, got None"),
        ({"share": True}, "group.share must be a number, got True"),
        ({"share": [1]}, "group.share must be a number, got [1]"),
        ({"name": None}, "group.name must be text, got None"),
        ({"name": True}, "group.name must be text, got True"),
        (
            {"name": 5},
            "group.name must be text, got 5; as text it needs quotes that the shell leaves alone: group.name=\"'5'\"",
        ),
        ({"most": 1.5}, "group.most must be a whole number or null, got 1.5"),
        ({"old": "x"}, "group.old must be a whole number or null, got 'x'"),
    ],
)
def test_anything_else_is_refused_by_name(values, message):
    with pytest.raises(TypeError) as refusal:
        check_types(Options(**values), "group")
    assert str(refusal.value) == message


def test_least_values():
    check_least(Options(count=1, most=None), "group", {"count": 1, "most": 1})
    with pytest.raises(ValueError, match=r"^group\.count must be at least 4, got 3$"):
        check_least(Options(), "group", {"count": 4})
    with pytest.raises(ValueError, match=r"^group\.most must be at least 1 or null, got 0$"):
        check_least(Options(most=0), "group", {"most": 1})


@pytest.mark.parametrize("wrong", ["REPLAY", "replya", None, [1], {"a": 1}])
def test_choices(wrong):
    check_choice("mode", "replay", {"replay": 1, "generate": 2})
    with pytest.raises(ValueError, match="^mode must be one of replay, generate, got ") as refusal:
        check_choice("mode", wrong, {"replay": 1, "generate": 2})
    assert ("; did you mean 'replay'?" in str(refusal.value)) == isinstance(wrong, str)


def test_no_torch_is_loaded_to_answer_a_typo():
    code = "import sys, kvstitch.evaluation.options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
