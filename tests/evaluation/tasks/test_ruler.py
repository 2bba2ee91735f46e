"""RULER's tasks: the text really holds what is asked, its length is what was allowed, and files of RULER are read."""

import hashlib
import json
import re
from collections import Counter

import pytest

from kvstitch.evaluation.tasks import BadRecord, Ruler
from kvstitch.evaluation.tasks.generated import Draft, longest
from kvstitch.evaluation.tasks.ruler import ANSWER_TOKENS

NEEDLES = [kind for kind in ANSWER_TOKENS if kind.startswith("niah")]
QUESTIONS = {
    "qa_1": {"data": [{"paragraphs": [
        {"context": f"Place {n} lies in land {n}.", "qas": [
            {"question": f"Where is place {n}?", "answers": [{"text": f"land {n}"}, {"text": f"land {n}"}]},
            {"question": "Impossible?", "answers": []},
        ]} for n in range(40)
    ]}]},
    "qa_2": [
        {"question": f"Who {n}?", "answer": f"person {n}", "supporting_facts": [[f"T{n}", 0], [f"U{n}", 0], [f"T{n}", 1]],
         "context": [[f"T{n}", ["a. ", "b."]], [f"U{n}", [f"person {n}."]], [f"V{n}", ["other."]]]}
        for n in range(20)
    ],
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """`source(kind)` -> path of questions."""

    def write(kind):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(QUESTIONS[kind]))
        return str(path)

    return write


def text_of(task, first):
    sample, text = first(task)
    return sample.questions[0], text


@pytest.mark.parametrize("kind", NEEDLES)
def test_needles_are_in_the_text(kind, first):
    task = Ruler(kind=kind, length=6000)
    question, text = text_of(task, first)
    facts = re.findall(r"the code (?:number|identifier) of (\S+) is ([^.]+)\.", text)
    assert len({key for key, _ in facts}) == (len(facts) if kind != "niah_multivalue" else 1)
    asked = [key for key, _ in facts if key in question.cue]
    assert Counter(question.gold) == Counter(value for key, value in facts if key in asked)
    assert len(question.gold) == (4 if kind in ("niah_multivalue", "niah_multiquery") else 1)
    assert len(facts) == {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(kind, len(facts))
    if kind in ("niah_multikey_2", "niah_multikey_3"):
        assert len(facts) > 15
    assert task.grade(question, " and ".join(question.gold)) == 1.0
    assert 0 <= question.meta["depth"] < 1


@pytest.mark.parametrize("kind", [kind for kind in ANSWER_TOKENS if kind != "cwe"])
def test_length_is_used_up_to_a_unit_and_never_exceeded(kind, first, source):
    task = Ruler(kind=kind, length=5000, source_path=source(kind) if kind.startswith("qa") else None)
    sample, text = first(task)
    (question,) = sample.questions
    used = len(sample.prompt_ids) + len(sample.trace_ids) - 1 + len(question.cue_ids)
    assert question.meta["tokens"] == used <= 5000 - ANSWER_TOKENS[kind]
    # The pool of the questions is finite; other units are a sentence or a word.
    assert used > 5000 - ANSWER_TOKENS[kind] - 250 or kind.startswith("qa")


def test_variable_tracking_resolves_to_the_gold(first):
    question, text = text_of(Ruler(kind="vt", length=4000), first)
    value = re.search(r"value (\d+)", question.cue).group(1)
    holds = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text):
        holds[name] = holds.get(source, source)
    assert {name for name, held in holds.items() if held == value} == set(question.gold) and len(question.gold) == 5


def test_common_words_are_the_most_common(first):
    question, text = text_of(Ruler(kind="cwe", length=8000), first)
    counts = Counter(re.findall(r"\d+\. (\S+)", text))
    assert {word for word, _ in counts.most_common(10)} == set(question.gold)
    assert set(counts.values()) == {30, 3} and len(counts) > 40


def test_frequent_words_are_the_most_frequent(first):
    question, text = text_of(Ruler(kind="fwe", length=8000), first)
    counts = Counter(text.split("\n\n", 1)[1].split()).most_common()
    assert counts[0][0] == "..." and [word for word, _ in counts[1:4]] == list(question.gold)
    assert counts[3][1] > counts[4][1]


@pytest.mark.parametrize("kind", ["qa_1", "qa_2"])
def test_documents_hold_the_answer(kind, first, source, tokenizer):
    task = Ruler(kind=kind, source_path=source(kind), length=3000, num_samples=8)
    samples = list(task.samples(tokenizer, 10_000))
    assert len({sample.questions[0].cue for sample in samples}) == 8
    question, text = text_of(task, first)
    assert len(question.gold) == 1 and text.count(question.gold[0] + ".") == 1
    assert task.grade(question, f"It is {question.gold[0]}, I think.") == 1.0
    documents = re.findall(r"Document \d+:", text)
    assert len(documents) == len(set(documents)) > 10


def test_questions_need_a_source_of_the_right_form(source, first):
    with pytest.raises(ValueError, match=r"task\.kind=qa_2 needs task\.source_path=<JSON file of HotpotQA>"):
        Ruler(kind="qa_2")
    with pytest.raises(ValueError, match=r"has not the form of HotpotQA"):
        first(Ruler(kind="qa_2", source_path=source("qa_1")))
    with pytest.raises(FileNotFoundError, match=r"task\.source_path=.*absent"):
        first(Ruler(kind="niah_single_2", source_path="absent"))


def test_a_book_as_haystack(first, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"Sentence number {chr(97 + n)} is\nhere." for n in range(20)))
    question, text = text_of(Ruler(kind="niah_single_2", length=3000, source_path=str(path)), first)
    assert text.count("Sentence number d is here.") >= 2 and question.gold[0] in text


def test_samples_depend_on_seed_and_index_alone(tokenizer):
    make = lambda **options: list(Ruler(kind="niah_multikey_3", length=2000, **options).samples(tokenizer, 10_000))
    three = make(num_samples=3)
    assert make(num_samples=2) == three[:2] and [s.id for s in three] == [f"niah_multikey_3-000{n}" for n in range(3)]
    assert len({s.prompt_ids + s.trace_ids for s in three}) == 3
    assert make(num_samples=1, seed=43)[0].questions[0].gold != three[0].questions[0].gold


DIGESTS = {
    "niah_single_1": "aaddab35ee2376c7",
    "niah_multikey_2": "7609dee6cfe39793",
    "niah_multikey_3": "367a4e19a1f96d62",
    "vt": "e9e50a5ddc5b012b",
    "cwe": "a58e898c337c1985",
    "fwe": "58540338ef0fb385",
}


@pytest.mark.parametrize("kind", DIGESTS)
def test_text_is_the_same_in_every_process(kind, first):
    """Nothing may hang on the hashes of strings, which differ from process to process."""
    question, text = text_of(Ruler(kind=kind, length=8000), first)
    assert hashlib.sha256((text + question.cue).encode()).hexdigest()[:16] == DIGESTS[kind]


def test_too_short_a_length_says_what_is_needed(first):
    with pytest.raises(
        ValueError, match=r"task\.length leaves 80 tokens to context and question, and \d+ are the least"
    ):
        first(Ruler(kind="cwe", length=200))


def test_longest_finds_the_last_that_fits(tokenizer):
    draft = lambda units: Draft("a" * 7 * units, "??", ("x",))
    for tokens in (2, 8, 9, 10, 100, 4097):
        assert len(longest(draft, tokenizer, tokens, 0).context) == (tokens - 2) // 7 * 7
    assert len(longest(draft, tokenizer, 1000, 0, most=5).context) == 35
    assert len(longest(draft, tokenizer, 1000, 0, most=0).context) == 0


def test_files_of_ruler(first, lines):
    record = {"index": 4, "input": "text and question", "outputs": ["France", "France", "Gaul"], "length": 99}
    task = Ruler(path=lines(record, name="qa_1.jsonl"), num_samples=None)
    sample, text = first(task)
    assert (task.kind, task.grader, task.max_new_tokens) == ("qa_1", "contains_any", 32)
    assert text == "text and question" and sample.questions[0].gold == ("France", "Gaul")
    assert sample.meta == {"index": 4, "length": 99} and sample.questions[0].cue == ""
    assert Ruler(path=lines(record, name="other.jsonl"), kind="vt").grader == "contains_all"
    with pytest.raises(
        ValueError,
        match=r"task\.kind \(by default .* task\.path is called\) must be .*got 'niah_single_4'; did you mean 'niah_single_",
    ):
        Ruler(path=lines(record, name="niah_single_4.jsonl"))
    with pytest.raises(BadRecord, match=r"vt\.jsonl:1: no field 'outputs'"):
        first(Ruler(path=lines({"input": "x"}, name="vt.jsonl"), num_samples=None))


def test_generation_needs_a_number_of_samples():
    with pytest.raises(ValueError, match=r"task\.num_samples=null: samples are generated without end"):
        Ruler(num_samples=None)
