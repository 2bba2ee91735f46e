"""Names say what tells configurations apart, shortly, and two that differ never have the same one."""

from hypothesis import given
from hypothesis import strategies as st

from kvstitch.evaluation.report.names import flat, told_apart, what_differs

CONFIGS = st.lists(
    st.dictionaries(st.sampled_from(["a.x", "b.x", "b.y", "_target_"]), st.sampled_from([1, 2, 3, "d/e", "f/e"])),
    min_size=1,
    max_size=6,
)


def test_what_most_have_goes_without_saying():
    usual = {"allocator.segment_mass": 0.1, "allocator.credit": True, "allocator.quota": "mass"}
    changed = [usual, {**usual, "allocator.credit": False}, {**usual, "allocator.segment_mass": 0.02}]
    assert what_differs(changed) == ["", "credit=False", "segment_mass=0.02"]
    # Between two nothing is usual, however often each of them comes.
    assert what_differs([usual, usual, usual, changed[1]]) == [*["credit=True"] * 3, "credit=False"]


def test_as_few_leaves_as_tell_sections_apart():
    first = {"task.path": "data/novel.txt", "task.length": 2560, "task.chat": False}
    second = {"task.path": "data/module.py", "task.length": 4096, "task.chat": False}
    assert told_apart([first, second]) == ["path=novel.txt", "path=module.py"]
    assert told_apart([first]) == [""]
    third = {**first, "task.length": 1024}
    assert told_apart([first, second, third])[::2] == ["path=novel.txt, length=2560", "path=novel.txt, length=1024"]


def test_names_are_as_long_as_they_must_be():
    assert what_differs([{"a.size": 1, "b.size": 2}, {"a.size": 2, "b.size": 1}]) == [
        "a.size=1, b.size=2",
        "a.size=2, b.size=1",
    ]
    assert what_differs([{"path": "one/text.txt"}, {"path": "two/text.txt"}]) == [
        "path=one/text.txt",
        "path=two/text.txt",
    ]
    assert what_differs([{"_target_": "m.A"}, {"_target_": "m.B"}]) == ["_target_=m.A", "_target_=m.B"]


@given(CONFIGS)
def test_different_configurations_have_different_names(configs):
    # A leaf that is missing and one that is None are the same.
    distinct = {repr(sorted(config.items())): config for config in configs}
    for name in (what_differs, told_apart):
        names = name(configs)
        assert len(names) == len(configs) and len(set(names)) == len(distinct), name


def test_flat():
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}
