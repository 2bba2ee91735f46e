"""The sets of mathematical problems: what the hub is asked for, and the same from a local file."""

import importlib.util

import pytest

from kvstitch.evaluation.tasks import AIME24, AIME25, GSM8K, Math500
from kvstitch.evaluation.tasks.math_problems import BOX

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


@pytest.mark.parametrize(
    ("kind", "record", "right", "wrong"),
    [
        (GSM8K, {"question": "Six eggs, ten gone?", "answer": "6 - 10 = -4\n#### -4"}, r"\boxed{-4}", r"\boxed{4}"),
        (GSM8K, {"question": "How much?", "answer": "so\n#### 2,125"}, "That is $2125.", "2,126"),
        (AIME24, {"problem": "Find n.", "answer": "070", "id": 60}, r"\boxed{70}", r"\boxed{7}"),
        (AIME25, {"problem": "Find n.", "answer": 11}, r"\boxed{11}", r"\boxed{711}"),
        pytest.param(
            Math500, {"problem": "Half?", "answer": "\\frac{1}{2}", "level": 2}, r"\boxed{0.5}", r"\boxed{2}",
            marks=needs_math_verify,
        ),
    ],
)  # fmt: skip
def test_problem_and_answer(kind, record, right, wrong, first, lines):
    task = kind(path=lines(record), max_new_tokens=50)
    sample, text = first(task)
    (question,) = sample.questions
    assert text == f"[user]{record.get('question', record.get('problem'))}\n\n{BOX}[assistant]"
    assert task.grade(question, right) == 1.0 and task.grade(question, wrong) == 0.0


@pytest.mark.parametrize(
    ("kind", "asked", "tokens"),
    [
        (GSM8K, ("openai/gsm8k", "main", "test"), 1024),
        pytest.param(Math500, ("HuggingFaceH4/MATH-500", None, "test"), 4096, marks=needs_math_verify),
        (AIME24, ("HuggingFaceH4/aime_2024", None, "train"), 32768),
        (AIME25, ("math-ai/aime25", None, "test"), 32768),
    ],
)
def test_the_hub_is_asked_for_a_pinned_commit(kind, asked, tokens, first, monkeypatch):
    import datasets

    calls = []

    def load(name, config, **options):
        calls.append((name, config, options))
        return [{"question": "q", "problem": "q", "answer": "#### 7", "subject": "Algebra"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = kind(answer_pattern="#### (.+)")
    sample, _ = first(task)
    # Once to look at all records, once for the samples.
    assert calls[0] == calls[-1]
    name, config, options = calls[0]
    assert (name, config, options["split"]) == asked and len(options["revision"]) == 40
    assert sample.questions[0].gold == ("7",) and sample.questions[0].max_new_tokens == tokens
    assert sample.id == f"{name.split('/')[1]}-000000"
    assert sample.meta == ({"subject": "Algebra"} if kind is Math500 else {})


def test_other_fields_template_and_the_worked_solution_as_a_trace(first, lines, tokenizer):
    record = {"text": "Six?", "key": "A", "steps": "3 + 3 = 6", "answer": "#### 6"}
    task = GSM8K(
        path=lines(record), prompt_field="text", chat=False, trace_field="steps", cue="\n{key}: ", instruction="Go."
    )
    sample, text = first(task)
    assert text == "Six?\n\nGo.3 + 3 = 6" and tokenizer.decode(sample.trace_ids) == "3 + 3 = 6"
    assert sample.questions[0].cue == "\nA: "
    assert first(GSM8K(path=task.path, template="Q: {text} {key}", chat=False))[1] == "Q: Six? A"


def test_a_data_set_that_cannot_be_reached_points_to_the_local_file(monkeypatch, tokenizer):
    import datasets

    def fail(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"openai/gsm8k .* could not be loaded: no network \(task\.path=<file> reads"):
        list(GSM8K().samples(tokenizer, 4096))
