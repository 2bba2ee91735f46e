"""A text that the model cannot hold is refused before it is made, however long that would take."""

import pytest

from kvstitch.evaluation.tasks import (
    BabiLong,
    KeyValues,
    LineRetrieval,
    Needle,
    NeedleGrid,
    Reasoning,
    Ruler,
    StateTracking,
    Text,
)

HUGE = 100_000_000


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        (Reasoning, {}, "length"),
        (Needle, {}, "length"),
        (Text, {"path": "never-read.txt"}, "length"),
        (BabiLong, {"path": "never-read.txt", "book_path": "never-read.txt"}, "length"),
        (Ruler, {}, "length"),
        (Ruler, {"kind": "qa_1", "source_path": "never-read.json"}, "length"),
        (NeedleGrid, {}, "max_length"),
        (KeyValues, {}, "num_keys"),
        (StateTracking, {}, "max_nodes"),
    ],
)
def test_a_size_beyond_the_model_is_told_at_once(kind, options, size):
    for value in (2049, HUGE):
        task = kind(**options, **{size: value})
        with pytest.raises(
            ValueError, match=rf"^task\.{size}={value} needs {value} positions .* but the model has 2048"
        ):
            # Without a tokenizer nothing can be made.
            next(task.samples(None, 2048))


def test_more_lines_than_names():
    most = 40_000
    with pytest.raises(ValueError, match=rf"^task\.num_lines={most} needs {most} positions"):
        next(LineRetrieval(num_lines=most).samples(None, 2048))
    with pytest.raises(
        ValueError, match=r"task\.num_lines must be in \[1, \d+\], got 100000000: there are no more names"
    ):
        LineRetrieval(num_lines=HUGE)


def test_sizes_that_just_fit_are_made(tokenizer):
    for task in (Reasoning(length=4096, num_samples=1), Needle(length=4096, num_samples=1), Ruler(length=4096)):
        assert next(task.samples(tokenizer, 8192)).context_tokens <= 4096
    exact = NeedleGrid(max_length=1024, num_lengths=1, num_depths=1)
    assert next(exact.samples(tokenizer, 1025)).context_tokens < 1024


def test_a_file_has_sizes_of_its_own(lines, tokenizer):
    path = lines({"prompt": "lines ...", "expected_number": 2416})
    assert next(LineRetrieval(path=path, num_lines=4000, num_samples=1).samples(tokenizer, 2048)).questions
