"""Local files of records: the forms that are read, and how a bad record is named in each."""

import zipfile

import pytest

from kvstitch.evaluation.tasks import JsonLines
from kvstitch.evaluation.tasks.sources import BadRecord, file_records, zip_records

RECORDS = [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "b"}]


def test_the_same_records_from_lines_list_and_parquet(tmp_path, lines):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "list.json").write_text('\ufeff [{"prompt": "p", "answer": "a"},\n {"prompt": "q", "answer": "b"}]')
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "rows.parquet")
    paths = (lines(*RECORDS), tmp_path / "list.json", tmp_path / "rows.parquet")
    found = [list(file_records(tmp_path / path)) for path in paths]
    assert [[record for _, _, record in records] for records in found] == [RECORDS] * 3
    assert [name for _, name, _ in found[0]] == ["data-000001", "data-000002"]
    assert [where.removeprefix(str(tmp_path)) for records in found for where, _, _ in records] == [
        "/data.jsonl:1", "/data.jsonl:2", "/list.json item 1", "/list.json item 2", "/rows.parquet row 1", "/rows.parquet row 2"
    ]  # fmt: skip


def test_a_bad_item_is_named_in_each_form(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('[{"prompt": "p"}, 3]')
    bad = list(file_records(path))[1][2]
    assert isinstance(bad, BadRecord) and str(bad).endswith("list.json item 2: must be a JSON object, got 3")
    path.write_text('[{"prompt": "p"},\n {"prompt": }]')
    ((_, _, bad),) = file_records(path)
    assert str(bad).endswith("list.json: not JSON: Expecting value at line 2 column 13")
    path.write_text('[{"prompt": ' + "[" * 200_000)
    ((_, _, bad),) = file_records(path)
    assert "brackets in more levels" in str(bad)
    (tmp_path / "rows.parquet").write_bytes(b"PAR?")
    with pytest.raises(ValueError, match=r"rows\.parquet is no Parquet file"):
        list(file_records(tmp_path / "rows.parquet"))
    with pytest.raises(FileNotFoundError, match=r"task\.book_path=.*absent: no such file"):
        list(file_records(tmp_path / "absent", "task.book_path"))


def test_a_member_of_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/set.jsonl", '{"a": 1}\n{')
    found = list(zip_records(tmp_path / "data.zip", "data/set.jsonl"))
    assert found[0] == (f"{tmp_path}/data.zip/data/set.jsonl:1", "set-000001", {"a": 1})
    assert "data/set.jsonl:2: not JSON" in str(found[1][2])
    with pytest.raises(ValueError, match=r"data\.zip holds no data/other\.jsonl"):
        list(zip_records(tmp_path / "data.zip", "data/other.jsonl"))


def test_skipped_records_are_counted_anew_each_time(tokenizer, lines):
    task = JsonLines(path=lines(b"{", RECORDS[0], {"prompt": "q"}, RECORDS[1]), on_bad_record="skip")
    for _ in range(2):
        assert len(list(task.samples(tokenizer, 4096))) == 2
        assert len(task.skipped) == 2
        assert "data.jsonl:1: not JSON" in task.skipped[0] and "data.jsonl:3: no field 'answer'" in task.skipped[1]


def test_a_long_prompt_loses_its_middle_and_says_so(first, lines):
    task = JsonLines(path=lines({"prompt": "abc" + "-" * 500 + "xyz", "answer": "a"}), truncate_middle=True)
    sample, text = first(task, positions=120)
    # 120 positions, less the begin token and 32 for the answer.
    assert len(sample.prompt_ids) == 88 and sample.meta == {"removed_tokens": 506 - 87}
    assert text == "abc" + "-" * 81 + "xyz"
    sample, text = first(JsonLines(path=task.path, truncate_middle=True, max_prompt_tokens=20, chat=True))
    assert text == "[user]abc" + "-" * 14 + "xyz[assistant]" and sample.meta == {"removed_tokens": 486}
    sample, _ = first(JsonLines(path=task.path, truncate_middle=True))
    assert sample.meta == {"removed_tokens": 0}


def test_letters_of_several_bytes_are_never_cut_apart(first, lines):
    task = JsonLines(path=lines({"prompt": "äöü" * 40, "answer": "a"}), truncate_middle=True, max_prompt_tokens=21)
    sample, text = first(task)
    # A half letter keeps its other half, and then a whole one has to go.
    assert set(text) == set("äöü") and len(sample.prompt_ids) - 1 <= 21 and sample.meta["removed_tokens"] >= 240 - 21


def test_truncation_options_that_make_no_sense(lines, tokenizer):
    with pytest.raises(ValueError, match=r"task\.max_prompt_tokens=100 .* needs task\.truncate_middle=true"):
        JsonLines(path="x", max_prompt_tokens=100)
    task = JsonLines(path=lines(RECORDS[0]), truncate_middle=True)
    with pytest.raises(
        BadRecord, match=r"33 positions leave no room for a prompt: 32 go to .* task\.max_new_tokens=32"
    ):
        list(task.samples(tokenizer, 33))


def test_a_gold_that_no_answer_could_match_is_a_bad_record(tokenizer, lines):
    task = JsonLines(
        path=lines(RECORDS[0], {"prompt": "p", "answer": "12"}), grader="first_number", on_bad_record="skip"
    )
    assert [sample.questions[0].gold for sample in task.samples(tokenizer, 4096)] == [("12",)]
    assert "data.jsonl:1: gold 'a' holds 0 numbers, a number grader needs exactly one" in task.skipped[0]
