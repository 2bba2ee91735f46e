"""Reasoning and needle: determinism, true arithmetic, spread depths, no short cut to the answer, exact token splits."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from transformers import AutoTokenizer

from kvstitch.evaluation.smollm2 import smollm2_folder
from kvstitch.evaluation.tasks import Needle, Reasoning

POSITIONS = 8192
TASKS = [Reasoning, Needle]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(smollm2_folder())


@pytest.fixture(scope="module")
def derivations(tokenizer):
    """Samples of the default reasoning task, with all their variables asked for."""
    task = Reasoning(num_samples=12, num_questions=Reasoning.num_steps)
    return [(sample, text_of(tokenizer, sample)) for sample in task.samples(tokenizer, POSITIONS)]


def text_of(tokenizer, sample):
    return tokenizer.decode(sample.prompt_ids + sample.trace_ids)


def asked_name(question):
    return re.search(r"(\w+) =$", question.cue).group(1)


@pytest.mark.parametrize("task", TASKS)
def test_sample_depends_on_seed_and_index_alone(task, tokenizer):
    three = list(task(num_samples=3).samples(tokenizer, POSITIONS))
    assert list(task(num_samples=2).samples(tokenizer, POSITIONS)) == three[:2]
    assert len({sample.prompt_ids + sample.trace_ids for sample in three}) == 3
    assert [sample.id for sample in three] == sorted({sample.id for sample in three})
    assert next(task(seed=43).samples(tokenizer, POSITIONS)).trace_ids != three[0].trace_ids


def test_samples_do_not_depend_on_the_process(tokenizer):
    """String hashes differ from process to process; nothing may hang on them."""
    script = (
        "from transformers import AutoTokenizer\n"
        "from kvstitch.evaluation.smollm2 import smollm2_folder\n"
        "from kvstitch.evaluation.tasks import Needle, Reasoning\n"
        "tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())\n"
        "print([list(task(num_samples=1).samples(tokenizer, 8192)) for task in (Reasoning, Needle)])\n"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    here = [list(task(num_samples=1).samples(tokenizer, POSITIONS)) for task in (Reasoning, Needle)]
    assert result.stdout.strip() == repr(here)


@pytest.mark.parametrize("task", TASKS)
def test_split_is_exact(task, tokenizer):
    split = task(num_samples=2).samples(tokenizer, POSITIONS)
    whole = task(num_samples=2, prefill_tokens=None).samples(tokenizer, POSITIONS)
    for sample, unsplit in zip(split, whole, strict=True):
        assert len(sample.prompt_ids) == 512
        assert 2560 - 60 < sample.context_tokens <= 2560
        assert unsplit.prompt_ids + unsplit.trace_ids == sample.prompt_ids + sample.trace_ids
        for question in sample.questions:
            assert list(question.cue_ids) == tokenizer(question.cue)["input_ids"]
            assert sample.input_ids(question) == sample.prompt_ids + sample.trace_ids + question.cue_ids
            assert not question.cue.endswith(" ")


def test_derivation_is_true_and_answers_stand_in_it(derivations):
    for sample, text in derivations:
        stated = re.findall(r"^Step (\d+)\. (.*?)Remember that (\w+) = (\d+)\.$", text, re.MULTILINE)
        assert [int(number) for number, *_ in stated] == list(range(1, Reasoning.num_steps + 1))
        values = {}
        for _, reason, name, value in stated:
            if derived := re.fullmatch(
                r"Now take (\d+) (more|fewer) than (\w+)\. Since (\w+) = (\d+), we get (\d+) ([+-]) (\d+) = (\d+), "
                r"so (\w+) = (\d+)\. ",
                reason,
            ):
                difference, word, source, source_again, known, left, sign, right, result, again, once_more = (
                    derived.groups()
                )
                assert source == source_again and values[source] == int(known) == int(left)
                assert difference == right and (word == "more") == (sign == "+")
                assert int(left) + int(sign + right) == int(result) == int(value) == int(once_more) and again == name
            else:
                assert reason == "This one is given. "
            values[name] = int(value)
        assert len(set(values.values())) == len(values) == Reasoning.num_steps
        assert {asked_name(question): question.gold for question in sample.questions} == {
            name: (str(value),) for name, value in values.items()
        }


def test_depth_is_that_of_the_last_mention(derivations, tokenizer):
    for sample, text in derivations[:4]:
        for question in sample.questions:
            place = [match.start() for match in re.finditer(rf"\b{asked_name(question)}\b", text)][-1]
            depth = len(tokenizer(text[:place])["input_ids"]) / sample.context_tokens
            # The step begins at most a line before the name.
            assert 0 <= depth - question.meta["depth"] < 0.03


def test_reasoning_questions_come_from_everywhere(tokenizer):
    task = Reasoning(num_samples=40)
    depths = [question.meta["depth"] for sample in task.samples(tokenizer, POSITIONS) for question in sample.questions]
    quarters = Counter(int(4 * depth) for depth in depths)
    assert len(depths) == 160
    # Those that later steps build on are last mentioned later, so that fewer are found early.
    assert all(quarters[quarter] >= 16 for quarter in range(4)), quarters


@pytest.mark.parametrize("task", [Reasoning, Needle])
def test_no_rule_of_thumb_finds_the_answers(task, tokenizer):
    """First, last, largest or smallest number stated: none answers more often than guessing among the competitors."""
    rules = {"first": lambda v: v[0], "last": lambda v: v[-1], "largest": max, "smallest": min}
    hits, asked = Counter(), 0
    for sample in task(num_samples=30).samples(tokenizer, POSITIONS):
        values = [int(value) for value in re.findall(r"Remember that \w+ = (\d+)\.", text_of(tokenizer, sample))]
        asked += len(sample.questions)
        for question in sample.questions:
            hits.update(name for name, rule in rules.items() if rule(values) == int(question.gold[0]))
    guessing = 1 / (Reasoning.num_steps if task is Reasoning else Needle.num_keys)
    assert all(hits[name] / asked <= guessing + 0.06 for name in rules), hits


@pytest.mark.parametrize(("keys", "digits"), [(1, 5), (4, 4), (9, 3)])
def test_needles_stand_once_where_they_are_said_to(tokenizer, keys, digits):
    task = Needle(num_samples=3, num_keys=keys, num_questions=keys, digits=digits)
    for sample in task.samples(tokenizer, POSITIONS):
        text = text_of(tokenizer, sample)
        assert len(re.findall(rf"Remember that \w+ = \d{{{digits}}}\.", text)) == keys
        assert len({question.gold for question in sample.questions}) == len(sample.questions) == keys
        for question in sample.questions:
            needle = f"Remember that {asked_name(question)} = {question.gold[0]}."
            assert text.count(needle) == text.count(asked_name(question)) == 1
            assert text.index(needle) / len(text) == pytest.approx(question.meta["depth"], abs=0.05)


def test_single_needles_of_a_run_cover_the_text(tokenizer):
    samples = list(Needle(num_samples=20, num_keys=1).samples(tokenizer, POSITIONS))
    assert {len(sample.questions) for sample in samples} == {1}
    depths = sorted(sample.questions[0].meta["depth"] for sample in samples)
    assert depths[0] < 0.1 and depths[-1] > 0.9
    assert max(later - earlier for earlier, later in zip(depths, depths[1:])) < 0.12


@pytest.mark.parametrize("task", TASKS)
def test_prose_holds_nothing_that_could_be_an_answer(task, tokenizer):
    for sample in task(num_samples=2).samples(tokenizer, POSITIONS):
        lines = [line for line in text_of(tokenizer, sample).splitlines() if not line.startswith("Step ")]
        prose = re.sub(r"Remember that \w+ = \d+\.", "", "\n".join(lines))
        assert not re.search(r"\d", prose)
        assert not [question for question in sample.questions if re.search(rf"\b{asked_name(question)}\b", prose)]


@pytest.mark.parametrize("task", TASKS)
def test_chat_wraps_the_prompt_and_goes_on_as_the_assistant(task, tokenizer):
    sample = next(task(chat=True).samples(tokenizer, POSITIONS))
    text = text_of(tokenizer, sample)
    assert text.startswith("<|im_start|>system\n")
    assert text.count("<|im_start|>assistant\n") == 1
    assert not text.endswith("<|im_end|>")


@pytest.mark.parametrize("task", TASKS)
def test_grade_reads_the_number_that_comes_first(task, tokenizer):
    task = task()
    question = next(task.samples(tokenizer, POSITIONS)).questions[0]
    assert task.grade(question, f" {question.gold[0]}.\nStep 13") == 1.0
    assert task.grade(question, f" {question.gold[0]}1") == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_length_that_cannot_be(task, tokenizer):
    with pytest.raises(ValueError, match=r"needs \d+ positions .* but the model has 2048"):
        next(task().samples(tokenizer, 2048))
    with pytest.raises(ValueError, match=r"task\.length=60 is \d+ tokens too short"):
        next(task(length=60).samples(tokenizer, POSITIONS))


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Reasoning, {"num_steps": 1}, r"task\.num_steps must be in \[2, 36\], got 1"),
        (Reasoning, {"num_questions": 13}, r"task\.num_questions must be in \[1, task\.num_steps=8\], got 13"),
        (Reasoning, {"given_fraction": 1.5}, r"task\.given_fraction must be in \[0, 1\], got 1\.5"),
        (Reasoning, {"num_samples": None}, r"task\.num_samples=null"),
        (Reasoning, {"num_samples": 0}, r"task\.num_samples must be at least 1"),
        (Reasoning, {"prefill_tokens": 0}, r"task\.prefill_tokens must be at least 1"),
        (Reasoning, {"max_new_tokens": 0}, r"task\.max_new_tokens must be at least 1"),
        (Reasoning, {"grader": "last_numbr"}, "did you mean 'last_number'"),
        (Needle, {"num_keys": 0}, r"task\.num_keys must be in"),
        (
            Needle,
            {"num_keys": 4, "num_questions": 5},
            r"task\.num_questions must be null or in \[1, task\.num_keys=4\], got 5",
        ),
        (Needle, {"digits": 1}, r"task\.digits must be in \[2, 12\], got 1"),
        (Needle, {"num_samples": None}, r"task\.num_samples=null"),
    ],
)
def test_refused_options(task, options, message):
    with pytest.raises(ValueError, match=message):
        task(**options)


def test_most_steps_always_find_a_value(tokenizer):
    for sample in Reasoning(num_samples=8, num_steps=36, given_fraction=0.0, length=4096).samples(tokenizer, POSITIONS):
        assert len(re.findall(r"^Step ", text_of(tokenizer, sample), re.MULTILINE)) == 36
