"""The wanted answer of every built-in task fits into its `max_new_tokens`, or no model could be right."""

import importlib.util
import json

import pytest
from transformers import AutoTokenizer

from kvstitch.evaluation import tasks
from kvstitch.evaluation.smollm2 import smollm2_folder
from kvstitch.evaluation.tasks import Task
from kvstitch.evaluation.tasks.encoding import encode
from kvstitch.evaluation.tasks.ruler import ANSWER_TOKENS
from kvstitch.evaluation.tasks.state_tracking import ASKS

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)
CHOICES = {f"choice_{letter}": "text" for letter in "ABCD"}
SQUAD = {"data": [{"paragraphs": [{"context": f"In the year {n} the river rose.", "qas": [
    {"question": "Why?", "answers": [{"text": "because of heavy rain in the mountains of the north"}]}
]} for n in range(60)]}]}  # fmt: skip
HOTPOT = [
    {"question": "Who?", "answer": "the mayor of a small town by the sea", "supporting_facts": [[f"T{n}", 0], [f"U{n}", 0]],
     "context": [[f"T{n}", ["a. "]], [f"U{n}", ["b. "]]]} for n in range(60)
]  # fmt: skip
STORIES = (
    "1 John went to the hallway.\n2 Where is John? \thallway\t1\n3 John took the football.\n4 What? \tfootball\t3\n"
)

# Options of each, and what its files hold.
MADE = [
    ("Reasoning", {"num_samples": 4}, {}),
    ("Needle", {"num_samples": 4, "length": 1500}, {}),
    ("NeedleGrid", {"max_length": 1024, "num_lengths": 1}, {}),
    ("KeyValues", {"num_keys": 9}, {}),
    ("LineRetrieval", {"num_lines": 20}, {}),
    *[("StateTracking", {"ask": ask, "num_samples": 100}, {}) for ask in ASKS],
    ("StateTracking", {"ask": "visited_nodes", "min_nodes": 150, "max_nodes": 150, "min_steps": 300, "max_steps": 300}, {}),
    *[("Ruler", {"kind": kind, "length": 2048, "num_samples": 1}, {}) for kind in ANSWER_TOKENS if kind[:2] != "qa"],
    ("Ruler", {"kind": "qa_1", "length": 1024, "num_samples": 2}, {"source_path": json.dumps(SQUAD)}),
    ("Ruler", {"kind": "qa_2", "length": 1024, "num_samples": 2}, {"source_path": json.dumps(HOTPOT)}),
    ("BabiLong", {"length": 512, "num_samples": 2}, {"path": STORIES, "book_path": "It was a dark night. The wind blew."}),
    ("GSM8K", {}, {"path": json.dumps({"question": "How much?", "answer": "6 + 6 = 12\n#### -1,234,567"})}),
    pytest.param(
        "Math500", {}, {"path": json.dumps({"problem": "Solve.", "answer": r"\left(3, \frac{\pi}{2}\right)"})},
        marks=needs_math_verify,
    ),
    ("AIME24", {}, {"path": json.dumps({"problem": "Find n.", "answer": 113})}),
    ("AIME25", {}, {"path": json.dumps({"problem": "Find n.", "answer": 113})}),
    ("LongBenchV2", {}, {"path": json.dumps({"context": "c", "question": "q", "answer": "B"} | CHOICES)}),
    ("LongBench", {"subset": "passage_retrieval_en"}, {"path": json.dumps(
        {"context": "c", "input": "i", "answers": ["Paragraph 12"], "all_classes": None})}),
    ("LongBench", {"subset": "trec"}, {"path": json.dumps(
        {"context": "c", "input": "i", "answers": ["Individual"], "all_classes": ["Individual", "Individual or group"]})}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(smollm2_folder())


def test_every_task_is_looked_at():
    kinds = {
        name for name in tasks.__all__ if isinstance(kind := getattr(tasks, name), type) and issubclass(kind, Task)
    }
    named = {(entry.values if hasattr(entry, "values") else entry)[0] for entry in MADE}
    # Nothing is asked about a text; answers of the user's own records, and lines of code, are of any length.
    assert kinds - named == {"Task", "Text", "JsonLines", "Hub", "RepoBenchP"}


@pytest.mark.parametrize(("name", "options", "files"), MADE)
def test_the_wanted_answer_fits(name, options, files, tokenizer, tmp_path):
    for option, text in files.items():
        (tmp_path / f"{option}.json").write_text(text)
    task = getattr(tasks, name)(**options, **{option: str(tmp_path / f"{option}.json") for option in files})
    asked = [question for sample in task.samples(tokenizer, 100_000) for question in sample.questions]
    assert asked
    for question in asked:
        # All of them are wanted there, elsewhere one is enough; classes and labels put the right one first.
        wanted = [" ".join(question.gold)] if task.grader == "contains_all" else [question.gold[0]]
        assert max(len(encode(tokenizer, f" {text}")) for text in wanted) <= question.max_new_tokens
