"""Text files, JSON Lines and data sets: what becomes a sample, and what is refused by name."""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvstitch.evaluation.tasks import BadRecord, Hub, JsonLines, Text

POSITIONS = 4096


@pytest.fixture
def tokenizer():
    """One token a byte, a begin token in front of a text, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(["<s>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "<s>{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=template)


@pytest.fixture
def lines(tmp_path):
    def write(*records):
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
        return str(path)

    return write


def only(task, tokenizer):
    (sample,) = task.samples(tokenizer, POSITIONS)
    return sample


# --- text ---------------------------------------------------------------------------------------


def test_pieces_are_consecutive_and_each_begins_with_the_begin_token(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeff".encode() + "".join(chr(97 + index % 26) for index in range(100)).encode())
    samples = list(Text(path=str(path), length=31, prefill_tokens=8, num_samples=None).samples(tokenizer, POSITIONS))
    assert [sample.id for sample in samples] == ["book-0000", "book-0001", "book-0002"]
    assert [(len(sample.prompt_ids), len(sample.trace_ids)) for sample in samples] == [(8, 23)] * 3
    assert {sample.prompt_ids[0] for sample in samples} == {0}
    joined = "".join(tokenizer.decode((sample.prompt_ids + sample.trace_ids)[1:]) for sample in samples)
    assert joined == path.read_text("utf-8-sig")[:90]
    assert not any(sample.questions for sample in samples)


def test_text_that_is_too_short_or_unreadable(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a" * 100)
    with pytest.raises(
        ValueError, match=r"100 tokens make 3 pieces of task\.length=31, and task\.num_samples=4 wants 4"
    ):
        next(Text(path=str(path), length=31).samples(tokenizer, POSITIONS))
    for count in (None, 4):
        with pytest.raises(
            ValueError, match=r"100 tokens are no piece of task\.length=\d+; lower task\.length to 101 or less"
        ):
            next(Text(path=str(path), num_samples=count).samples(tokenizer, POSITIONS))
    assert len(list(Text(path=str(path), num_samples=None, length=101).samples(tokenizer, POSITIONS))) == 1
    with pytest.raises(ValueError, match=r"needs 60 positions .* but the model has 50"):
        next(Text(path=str(path), length=60, num_samples=1).samples(tokenizer, 50))
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"book\.txt is not UTF-8: .* at byte 3"):
        next(Text(path=str(path)).samples(tokenizer, POSITIONS))
    with pytest.raises(FileNotFoundError, match=r"task\.path=.*absent\.txt: no such file"):
        next(Text(path=str(tmp_path / "absent.txt")).samples(tokenizer, POSITIONS))


def test_text_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match=r"task\.chat=true has no meaning"):
        Text(path="x", chat=True)
    with pytest.raises(ValueError, match=r"task\.length must be at least 2, got 1"):
        Text(path="x", length=1)


# --- records ------------------------------------------------------------------------------------


def test_fields_trace_cue_and_pattern(tokenizer, lines):
    """The shape of GSM8K: a worked solution whose last line holds the answer."""
    path = lines({"question": "How many?", "answer": "6 * 3 = 18\n#### 18"})
    task = JsonLines(
        path=path, prompt_field="question", trace_field="answer", answer_pattern="#### (.+)", cue="\nAnswer to {question}",
        grader="last_number",
    )  # fmt: skip
    sample = only(task, tokenizer)
    (question,) = sample.questions
    assert tokenizer.decode(sample.prompt_ids) == "<s>How many?"
    assert tokenizer.decode(sample.trace_ids) == "6 * 3 = 18\n#### 18"
    assert tokenizer.decode(question.cue_ids) == "\nAnswer to How many?"
    assert (question.gold, question.max_new_tokens, sample.id) == (("18",), 32, "data-000001")
    assert task.grade(question, "so 6 * 3 is 18.") == 1.0


def test_template_writes_what_is_not_text_as_json(tokenizer, lines):
    path = lines({"records": [["a", "b"]], "key": "a", "answer": "b"})
    sample = only(JsonLines(path=path, template='{{"data": {records}}} key {key}'), tokenizer)
    assert tokenizer.decode(sample.prompt_ids) == '<s>{"data": [["a", "b"]]} key a'


def test_gold_of_lists_and_numbers(tokenizer, lines):
    path = lines({"prompt": "p", "answer": ["711", 11]}, {"prompt": "p", "answer": 2416})
    task = JsonLines(path=path, grader="contains_all")
    first, second = task.samples(tokenizer, POSITIONS)
    assert first.questions[0].gold == ("711", "11")
    assert second.questions[0].gold == ("2416",)
    assert task.grade(first.questions[0], "711 only") == 0.5


def test_without_an_answer_field_nothing_is_asked(tokenizer, lines):
    sample = only(JsonLines(path=lines({"prompt": "x" * 40}), answer_field=None, prefill_tokens=16), tokenizer)
    assert (len(sample.prompt_ids), len(sample.trace_ids), sample.questions) == (16, 25, ())


def test_chat_template_brings_its_own_begin_token(tokenizer, lines):
    path = lines({"prompt": "hi", "answer": "x"})
    assert tokenizer.decode(only(JsonLines(path=path, chat=True), tokenizer).prompt_ids) == "<s>[user]hi[assistant]"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"data\.jsonl:1: task\.chat=true needs a tokenizer with a chat template"):
        only(JsonLines(path=path, chat=True), tokenizer)


def test_limit_blank_lines_and_names(tokenizer, lines):
    path = lines({"prompt": "a", "id": "x/1"}, b"", b"  ", {"prompt": "b", "id": "y z"}, {"prompt": "c", "id": 3})
    ids = [
        s.id
        for s in JsonLines(path=path, answer_field=None, id_field="id", num_samples=2).samples(tokenizer, POSITIONS)
    ]
    assert ids == ["x%2F1", "y z"]
    ids = [sample.id for sample in JsonLines(path=path, answer_field=None).samples(tokenizer, POSITIONS)]
    assert ids == ["data-000001", "data-000004", "data-000005"]


BAD = [
    (b'{"prompt": "p", "answer": ', r"data\.jsonl:2: not JSON: Expecting value at column 27"),
    (b'{"prompt": "caf\xe9"}', r"data\.jsonl:2: not UTF-8: .* at byte 15 of the line"),
    (["p"], r"data\.jsonl:2: must be a JSON object, got \['p'\]"),
    (
        {"promt": "p", "answer": "a"},
        r"data\.jsonl:2: no field 'prompt', it has 'promt', 'answer'; did you mean 'promt'\?",
    ),
    ({"prompt": 3, "answer": "a"}, r"data\.jsonl:2: field 'prompt' must hold text, got 3"),
    (
        {"prompt": "p", "answer": None},
        r"data\.jsonl:2: field 'answer' must hold text, a number or a list of them, got None",
    ),
    ({"prompt": "p", "answer": []}, r"data\.jsonl:2: field 'answer' must hold .* got \[\]"),
    ({"prompt": "p" * 5000, "answer": "a"}, r"data\.jsonl:2: sample 'data-000002' needs 5033 positions"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_bad_record_is_named_by_its_line(tokenizer, lines, caplog, record, message):
    path = lines({"prompt": "p", "answer": "a"}, record, {"prompt": "q", "answer": "a"})
    with pytest.raises(BadRecord, match=message):
        list(JsonLines(path=path).samples(tokenizer, POSITIONS))
    if "positions" not in message:
        # What is wrong with text or fields needs no model, and shows before the first sample.
        with pytest.raises(BadRecord, match=message):
            JsonLines(path=path).check_source()
        with pytest.raises(BadRecord, match=message):
            next(JsonLines(path=path).samples(tokenizer, POSITIONS))
    with caplog.at_level(logging.WARNING, logger="kvstitch"):
        kept = list(JsonLines(path=path, on_bad_record="skip").samples(tokenizer, POSITIONS))
    assert [sample.id for sample in kept] == ["data-000001", "data-000003"]
    assert "data.jsonl:2" in caplog.text


def test_skipped_records_do_not_count(tokenizer, lines):
    path = lines(b"{", {"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "a"})
    kept = list(JsonLines(path=path, on_bad_record="skip", num_samples=2).samples(tokenizer, POSITIONS))
    assert [sample.id for sample in kept] == ["data-000002", "data-000003"]
    with pytest.raises(ValueError, match=r"task\.path=.*data\.jsonl holds no readable record"):
        list(JsonLines(path=lines(b"{"), on_bad_record="skip").samples(tokenizer, POSITIONS))
    with pytest.raises(ValueError, match=r"task\.path=.*data\.jsonl holds no usable record, and at least 1 is wanted"):
        list(JsonLines(path=lines({"a": "b"}), on_bad_record="skip").samples(tokenizer, POSITIONS))


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_too_few_records_are_told_before_the_first_sample(tokenizer, lines, policy):
    path = lines({"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "a"}, *([b"{"] if policy == "skip" else []))
    samples = JsonLines(path=path, on_bad_record=policy, num_samples=3).samples(tokenizer, POSITIONS)
    with pytest.raises(
        ValueError, match=r"data\.jsonl holds 2 readable records, task\.num_samples wants 3; .*=null takes"
    ):
        next(samples)
    assert len(list(JsonLines(path=path, on_bad_record=policy, num_samples=2).samples(tokenizer, POSITIONS))) == 2


def test_records_that_turn_out_useless_leave_fewer_samples_and_a_warning(tokenizer, lines, caplog):
    path = lines({"prompt": "p", "answer": "a"}, {"prompt": "q"}, {"prompt": "r", "answer": "a"})
    task = JsonLines(path=path, on_bad_record="skip", num_samples=3)
    with caplog.at_level(logging.WARNING, logger="kvstitch"):
        assert len(list(task.samples(tokenizer, POSITIONS))) == 2
    assert "data.jsonl holds 2 usable records, task.num_samples wants 3: the results are of those" in caplog.text
    assert len(task.skipped) == 1


def test_repeated_id_and_unmatched_pattern(tokenizer, lines):
    path = lines({"prompt": "p", "answer": "a", "id": 1}, {"prompt": "q", "answer": "a", "id": 1})
    with pytest.raises(BadRecord, match=r"data\.jsonl:2: the id '1' has occurred before"):
        list(JsonLines(path=path, id_field="id").samples(tokenizer, POSITIONS))
    with pytest.raises(BadRecord, match=r"data\.jsonl:1: 'answer' does not match '#### \(\.\+\)': 'a'"):
        list(JsonLines(path=path, answer_pattern="#### (.+)").samples(tokenizer, POSITIONS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_record": "ignore"}, r"task\.on_bad_record must be error or skip, got 'ignore'"),
        ({"answer_pattern": "####"}, r"needs a group"),
        ({"answer_pattern": "("}, r"task\.answer_pattern='\(' is no regular expression: missing \)"),
        ({"template": "{a.__class__}"}, r"task\.template=.* \{a\.__class__\} is not the name of a field"),
        ({"template": "{a[0]}"}, r"is not the name of a field"),
        ({"template": "{a"}, r"task\.template='\{a': .* for braces"),
        ({"cue": "{}"}, r"task\.cue='\{\}'"),
    ],
)
def test_refused_record_options(options, message):
    with pytest.raises(ValueError, match=message):
        JsonLines(path="x", **options)


@pytest.mark.parametrize("task", [JsonLines, Text])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_empty_files_and_folders_are_told_as_such(task, content, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"task\.path=.*data\.jsonl is empty"):
        task(path=str(path)).check_source()
    wanted = "a file of JSON Lines, of one JSON list" if task is JsonLines else "a UTF-8 text file"
    with pytest.raises(IsADirectoryError, match=rf"task\.path={tmp_path} is a folder; give {wanted}"):
        task(path=str(tmp_path)).check_source()


def test_a_list_without_records_is_told_as_such(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    for count in (None, 3):
        with pytest.raises(ValueError, match=r"data\.json holds no readable record$"):
            JsonLines(path=str(tmp_path / "data.json"), num_samples=count).check_source()


def test_missing_file(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"task\.path=.*absent\.jsonl: no such file"):
        list(JsonLines(path=str(tmp_path / "absent.jsonl")).samples(tokenizer, POSITIONS))


# --- data sets ----------------------------------------------------------------------------------


def test_data_set_from_a_local_folder(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "small-set"
    folder.mkdir()
    records = [{"question": f"q{index}", "answer": f"so #### {index}"} for index in range(3)]
    (folder / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = Hub(name=str(folder), split="test", prompt_field="question", answer_pattern="#### (.+)", num_samples=2)
    samples = list(task.samples(tokenizer, POSITIONS))
    assert [sample.id for sample in samples] == ["small-set-000000", "small-set-000001"]
    assert [sample.questions[0].gold for sample in samples] == [("0",), ("1",)]
    with pytest.raises(ValueError, match=r"task\.name=.*small-set task\.split=train could not be loaded: .*train"):
        list(Hub(name=str(folder), split="train").samples(tokenizer, POSITIONS))
    with pytest.raises(BadRecord, match=r"small-set task\.split=test record 0: no field 'prompt'"):
        list(Hub(name=str(folder), split="test").samples(tokenizer, POSITIONS))
