"""LongBench and LongBench v2: prompts, graders and lengths of each subset, from a file, an archive and the hub."""

import json
import zipfile

import pytest

from kvstitch.evaluation.grading import GRADERS
from kvstitch.evaluation.tasks import BadRecord, LongBench, LongBenchV2, RepoBenchP
from kvstitch.evaluation.tasks.long_bench_subsets import SUBSETS

RECORD = {
    "input": "Who {x}?",
    "context": "CONTEXT {y}",
    "answers": ["Paris", "In Paris"],
    "all_classes": None,
    "length": 12,
    "dataset": "qasper",
}


@pytest.mark.parametrize("subset", SUBSETS)
def test_each_subset_asks_and_grades(subset, first, lines):
    classes = ["Paris", "Rome", "Paris"] if subset == "trec" else None
    answers = ["Paragraph 12"] if "passage" in subset else ["Paris"]
    path = lines(RECORD | {"answers": answers, "all_classes": classes}, name=f"{subset}.jsonl")
    task = LongBench(path=path, chat=False)
    sample, text = first(task)
    (question,) = sample.questions
    assert task.grader in GRADERS and question.max_new_tokens == SUBSETS[subset].max_new_tokens
    assert text.count("CONTEXT {y}") == 1
    asks_anything = "{input}" in SUBSETS[subset].question
    assert question.cue.count("Who {x}?") == asks_anything and "{input}" not in question.cue
    assert question.gold == (("Paris", "Rome") if subset == "trec" else tuple(answers))
    assert task.grade(question, answers[0]) == 1.0 and task.grade(question, "zzz 99") < 0.2
    assert sample.meta == {"length": 12, "dataset": "qasper", "removed_tokens": 0}


def test_a_chat_holds_the_question_but_examples_and_code_go_on_as_text(first, lines):
    path = lines(RECORD)
    sample, text = first(LongBench(path=path, subset="hotpotqa"))
    assert text.startswith("[user]") and text.endswith("Question: Who {x}?\nAnswer:[assistant]")
    assert sample.questions[0].cue == "" and sample.questions[0].gold == ("Paris", "In Paris")
    for subset in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"):
        assert not LongBench(path=path, subset=subset).chat
    assert RepoBenchP(path=path).grader == "code_similarity"


def test_given_settings_win(lines):
    task = LongBench(path=lines(RECORD), subset="qasper", grader="exact", max_new_tokens=7)
    assert (task.grader, task.max_new_tokens) == ("exact", 7)
    assert LongBench().subset == "qasper"
    with pytest.raises(
        ValueError, match=r"task\.subset must be one of narrativeqa, .*got 'hotpot'; did you mean 'hotpotqa'"
    ):
        LongBench(subset="hotpot")


def test_archive_from_the_hub_or_the_disk(first, tmp_path, monkeypatch):
    import huggingface_hub

    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("data/qmsum.jsonl", json.dumps(RECORD) + "\n")
    asked = []

    def download(name, file, **options):
        asked.append((name, file, options))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    sample, text = first(LongBench(subset="qmsum", revision="abc"))
    assert asked[0] == asked[-1] == ("zai-org/LongBench", "data.zip", {"repo_type": "dataset", "revision": "abc"})
    assert sample.id == "qmsum-000001" and "CONTEXT" in text
    assert first(LongBench(subset="qmsum", path=str(archive)))[0] == sample

    def fail(*arguments, **options):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"zai-org/LongBench .* could not be loaded: offline \(task\.path=<file>"):
        first(LongBench())


@pytest.mark.parametrize(("kind", "subset"), [(LongBench, "qasper"), (RepoBenchP, "repobench-p")])
def test_the_hub_is_asked_for_a_pinned_commit(kind, subset, first, tmp_path, monkeypatch):
    import huggingface_hub

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as opened:
        opened.writestr(f"data/{subset}.jsonl", json.dumps(RECORD) + "\n")
    asked = []

    def download(name, file, *, repo_type, revision):
        asked.append((name, file, repo_type, revision))
        return str(tmp_path / "data.zip")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    first(kind())
    assert (
        asked[0]
        == asked[-1]
        == ("zai-org/LongBench", "data.zip", "dataset", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672")
    )


def test_long_bench_v2_is_asked_for_at_a_pinned_commit(first, monkeypatch):
    import datasets

    asked = []

    def load(name, config, *, split, revision):
        asked.append((name, split, revision))
        return [V2]

    monkeypatch.setattr(datasets, "load_dataset", load)
    first(LongBenchV2())
    assert asked[0] == asked[-1] == ("zai-org/LongBench-v2", "train", "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9")


def test_a_class_list_is_needed_where_classes_are_graded(lines, first):
    task = LongBench(path=lines(RECORD, name="trec.jsonl"))
    assert first(task)[0].questions[0].gold == ("Paris",)
    with pytest.raises(BadRecord, match="no field 'all_classes'"):
        first(LongBench(path=lines({"input": "", "context": "", "answers": ["x"]}, name="trec.jsonl")))


V2 = {
    "_id": "a", "domain": "Code", "sub_domain": "s", "difficulty": "hard", "length": "short", "question": " Which one? ",
    "choice_A": "first", "choice_B": "second", "choice_C": "third", "choice_D": "fourth", "answer": "C", "context": "LONG " * 400,
}  # fmt: skip


def test_long_bench_v2(lines, first):
    task = LongBenchV2(path=lines(V2))
    sample, text = first(task)
    assert "Question: Which one?\n(A) first\n(B) second\n(C) third\n(D) fourth\n" in text and text.endswith(
        "[assistant]"
    )
    assert task.grade(sample.questions[0], "The correct answer is (C)") == 1.0
    assert sample.meta == {
        "domain": "Code",
        "sub_domain": "s",
        "difficulty": "hard",
        "length": "short",
        "removed_tokens": 0,
    }
    short, text = first(task, positions=1000)
    assert short.meta["removed_tokens"] > 1000 and len(short.prompt_ids) + 128 <= 1000
    assert "A text is given" in text and "(D) fourth" in text
    sample, _ = first(LongBenchV2(path=task.path, chat=False, id_field="_id"))
    assert sample.id == "a" and "(D) fourth" in sample.questions[0].cue
