"""Needle grid, key-value pairs, lines, state tracking and BABILong: true answers, places, files, and bad records."""

import hashlib
import json
import random
import re

import pytest

from kvstitch.evaluation.tasks import BabiLong, BadRecord, KeyValues, LineRetrieval, NeedleGrid, StateTracking
from kvstitch.evaluation.tasks.state_tracking import depth_first

# --- needle grid --------------------------------------------------------------------------------


def test_grid_has_every_length_and_depth(tokenizer):
    task = NeedleGrid(min_length=1000, max_length=2000, num_lengths=3, num_depths=3, samples_per_cell=2)
    samples = list(task.samples(tokenizer, 10_000))
    assert task.num_samples == len(samples) == 18
    cells = [(s.questions[0].meta["length"], s.questions[0].meta["depth"]) for s in samples]
    wanted = [(length, depth) for length in (1000, 1500, 2000) for depth in (0.0, 0.5, 1.0) for _ in range(2)]
    assert cells == wanted
    for sample in samples:
        (question,) = sample.questions
        text = tokenizer.decode((sample.prompt_ids + sample.trace_ids)[1:])
        place = text.index(f"is {question.gold[0]}.") / len(text)
        assert abs(place - question.meta["depth"]) < 0.2 and abs(question.meta["placed"] - question.meta["depth"]) < 0.1
        assert question.meta["length"] - 200 < question.meta["tokens"] + 16 <= question.meta["length"]
        assert task.grade(question, f" {question.gold[0]}.") == 1.0


def test_grid_in_a_book_with_few_cells(first, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was a dark night! " * 40)
    task = NeedleGrid(max_length=1024, num_lengths=1, num_depths=1, book_path=str(path))
    sample, text = first(task)
    assert sample.questions[0].meta["depth"] == 0.5 and "It was a dark night! The code number of" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_depths": 0}, r"task\.num_depths must be at least 1, got 0"),
        ({"max_length": 100}, r"task\.max_length=100 is below task\.min_length=1024"),
        ({"num_samples": 21}, r"task\.num_samples=21: the grid has 20"),
    ],
)
def test_impossible_grids(options, message):
    with pytest.raises(ValueError, match=message):
        NeedleGrid(**options)


# --- key-value pairs ----------------------------------------------------------------------------


def test_pairs_are_json_and_the_asked_one_moves_through_them(tokenizer):
    task = KeyValues(num_keys=9, num_samples=5)
    samples = list(task.samples(tokenizer, 10_000))
    assert [s.questions[0].meta["depth"] for s in samples] == [0.0, 0.25, 0.5, 0.75, 1.0]
    for sample in samples:
        (question,) = sample.questions
        text = tokenizer.decode((sample.prompt_ids + sample.trace_ids)[1:])
        pairs = json.loads(text[text.index("{") : text.rindex("}") + 1])
        key = re.search(r'Key: "(.+)"', question.cue).group(1)
        assert len(pairs) == 9 and question.gold == (pairs[key],)
        assert task.grade(question, f'"{pairs[key]}"') == 1.0 and task.grade(question, pairs[key][:-1]) == 0.0


def test_pairs_from_a_file(first, lines):
    record = {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "b", "value": "2"}
    sample, text = first(KeyValues(path=lines(record), num_samples=None))
    assert sample.questions[0].gold == ("2",) and '{"a": "1",\n "b": "2"}' in text
    for change, message in (
        ({"key": "c"}, "does not map 'c' to '2'"),
        ({"value": "1"}, "does not map 'b' to '1'"),
        ({"ordered_kv_records": [["a"]]}, "must hold pairs of texts"),
        ({"ordered_kv_records": 3}, "must hold a list of pairs, got 3"),
    ):
        with pytest.raises(BadRecord, match=r"data\.jsonl:1: .*" + message):
            first(KeyValues(path=lines(record | change), num_samples=None))


# --- lines --------------------------------------------------------------------------------------


def test_lines_hold_what_is_asked(first):
    task = LineRetrieval(num_lines=30)
    sample, text = first(task)
    (question,) = sample.questions
    held = dict(re.findall(r"Line (\S+): the register holds <(\d+)>\.", text))
    assert len(held) == 30 and question.gold == (held[re.search(r"line (\S+) hold", question.cue).group(1)],)
    assert task.grade(question, f"{question.gold[0]}>.") == 1.0
    assert list(held.values()).index(question.gold[0]) / 29 == pytest.approx(question.meta["depth"], abs=1e-4)


def test_lines_from_a_file(first, lines):
    sample, text = first(LineRetrieval(path=lines({"prompt": "lines ...", "expected_number": 2416}), num_samples=None))
    assert text == "lines ..." and sample.questions[0].gold == ("2416",)
    with pytest.raises(BadRecord, match=r"data\.jsonl:1: field 'expected_number' must hold a number, got '2416'"):
        first(LineRetrieval(path=lines({"prompt": "x", "expected_number": "2416"}), num_samples=None))


# --- state tracking -----------------------------------------------------------------------------


def by_recursion(edges, start):
    """Stacks of the search written as the recursion that it is."""
    stacks = []
    seen = set()

    def visit(node, stack):
        seen.add(node)
        stack = [*stack, node]
        stacks.append(stack)
        for other in sorted({a + b - node for a, b in edges if node in (a, b)}):
            if other not in seen:
                visit(other, stack)
                stacks.append(stack)

    visit(start, [])
    return stacks


def test_search_against_the_recursion():
    rng = random.Random(5)
    for _ in range(50):
        nodes = rng.randint(2, 12)
        edges = [(n, rng.randrange(n)) for n in range(1, nodes)] + [
            tuple(rng.sample(range(nodes), 2)) for _ in range(4)
        ]
        start = rng.randrange(nodes)
        states = depth_first(edges, start)
        assert [state.stack for state in states] == by_recursion(edges, start)
        assert states[-1].visited == list(range(nodes))


@pytest.mark.parametrize("ask", ["current_node", "stack", "visited_nodes"])
def test_states_are_those_of_the_search(ask, tokenizer):
    task = StateTracking(ask=ask, num_samples=20)
    for sample in task.samples(tokenizer, 10_000):
        (question,) = sample.questions
        text = tokenizer.decode(sample.prompt_ids[1:])
        edges = [tuple(map(int, edge)) for edge in re.findall(r"(\d+)-(\d+)", text)]
        steps = int(re.search(r"after (\d+) steps", question.cue).group(1))
        state = depth_first(edges, 0)[steps]
        wanted = {"current_node": [state.stack[-1]], "stack": state.stack, "visited_nodes": state.visited}[ask]
        assert list(map(int, question.gold[0].split(", "))) == wanted
        assert task.grade(question, f" {question.gold[0]}.\nMore") == 1.0 and task.grade(question, " 99") == 0.0
        assert len(edges) == len(set(edges)) == question.meta["edges"]


def test_states_from_a_file_are_checked(first, lines):
    record = {
        "graph": {"nodes": [0, 1, 2], "edges": [[0, 1], [1, 2]]},
        "start_node": 0,
        "steps": 2,
        "answer": {"current_node": 2, "stack": [0, 1, 2], "visited_nodes": [0, 1, 2]},
    }
    sample, text = first(StateTracking(path=lines(record), ask="stack", num_samples=None))
    assert sample.questions[0].gold == ("0, 1, 2",) and "0-1, 1-2" in text
    for change, message in (
        ({"steps": 9}, "the search has 4 steps, 'steps' is 9"),
        ({"steps": 1}, r"after 1 steps current_node is 1, the record says 2"),
        ({"graph": {"edges": [[0]]}}, "must hold pairs of nodes"),
        ({"answer": 2}, "must hold an object, got 2"),
    ):
        with pytest.raises(BadRecord, match=r"data\.jsonl:1: .*" + message):
            first(StateTracking(path=lines(record | change), num_samples=None))


# --- BABILong -----------------------------------------------------------------------------------

STORIES = """1 John went to the hallway.
2 Mary went to the bathroom.
3 Where is John? \thallway\t1
4 John moved to the garden.
5 Where is John? \tgarden\t1 4
1 Bill went to the kitchen.
2 Where is Bill? \tkitchen\t1
"""


@pytest.fixture
def babi(tmp_path):
    """`babi(text, **options)` -> the task."""
    (tmp_path / "book.txt").write_text("It was a dark night. " * 5 + "The wind blew! Who was there? ")

    def make(text=STORIES, **options):
        (tmp_path / "qa.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
        return BabiLong(path=str(tmp_path / "qa.txt"), book_path=str(tmp_path / "book.txt"), length=1500, **options)

    return make


def test_facts_stand_in_their_order_in_the_book(babi, tokenizer):
    task = babi(num_samples=None)
    samples = list(task.samples(tokenizer, 10_000))
    assert [sample.id for sample in samples] == ["qa-000003", "qa-000005", "qa-000007"]
    questions = [sample.questions[0] for sample in samples]
    assert [question.gold for question in questions] == [
        ("hallway", "garden", "kitchen"),
        ("garden", "hallway", "kitchen"),
        ("kitchen", "garden", "hallway"),
    ]
    text = tokenizer.decode((samples[1].prompt_ids + samples[1].trace_ids)[1:])
    places = [
        text.index(f) for f in ("John went to the hallway.", "Mary went to the bathroom.", "John moved to the garden.")
    ]
    assert places == sorted(places) and text.count("It was a dark night.") > 20
    assert abs(questions[1].meta["depth"] - places[2] / len(text)) < 0.15 and questions[1].meta["facts"] == 3
    assert 1300 < questions[1].meta["tokens"] <= 1500 - 16
    assert (
        task.grade(questions[1], " garden. It was") == 1.0 and task.grade(questions[1], " hallway, then garden") == 0.0
    )


def test_a_label_in_the_question_may_come_back(babi, tokenizer):
    text = "1 Fred gave the milk to Bill.\n2 What did Fred give to Bill? \tmilk\t1\n3 Who gave the milk? \tFred\t1\n"
    first, second = babi(text, num_samples=None).samples(tokenizer, 10_000)
    assert first.questions[0].gold == ("milk",) and second.questions[0].gold == ("Fred",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Where is John?", r"qa\.txt:2: must begin with a number and a text"),
        ("2 Where? \thallway", r"qa\.txt:2: a question must have an answer and the numbers of its facts"),
        ("2 Where? \thallway\t7", r"qa\.txt:2: the story has no facts 7"),
        (b"2 caf\xe9", r"qa\.txt:2: not UTF-8: .* at byte 5 of the line"),
    ],
)
def test_bad_lines_are_named(babi, tokenizer, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    text = b"1 John went to the hallway.\n" + line + b"\n3 Where is John?\thallway\t1\n"
    with pytest.raises(BadRecord, match=message):
        list(babi(text, num_samples=None).samples(tokenizer, 10_000))
    task = babi(text, num_samples=None, on_bad_record="skip")
    assert len(list(task.samples(tokenizer, 10_000))) == 1 and len(task.skipped) == 1


# --- all ----------------------------------------------------------------------------------------

DIGESTS = {KeyValues: "d3d647b080053c2a", LineRetrieval: "bd2b899dca610c66", StateTracking: "c449fcd9ed353a0f"}


@pytest.mark.parametrize("kind", DIGESTS)
def test_text_is_the_same_in_every_process(kind, first):
    """Nothing may hang on the hashes of strings, which differ from process to process."""
    sample, text = first(kind(num_samples=2))
    assert hashlib.sha256((text + sample.questions[0].cue).encode()).hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", [*DIGESTS, NeedleGrid])
def test_chat_puts_the_question_into_the_message(kind, first):
    sample, text = first(kind(num_samples=2, chat=True))
    assert text.startswith("[user]") and text.endswith("[assistant]") and sample.questions[0].cue == ""
    assert text.removesuffix("[assistant]").endswith(first(kind(num_samples=2))[0].questions[0].cue)


def test_too_few_stories_are_told_before_any_is_mixed(babi, tokenizer, monkeypatch):
    monkeypatch.setattr(BabiLong, "_mixed", lambda *arguments: pytest.fail("mixed"))
    with pytest.raises(ValueError, match=r"qa\.txt holds 3 readable records, task\.num_samples wants 4"):
        next(babi(num_samples=4).samples(tokenizer, 10_000))


def test_too_few_records_of_a_generators_file(lines, first):
    with pytest.raises(ValueError, match=r"data\.jsonl holds 1 readable records, task\.num_samples wants 10"):
        first(LineRetrieval(path=lines({"prompt": "lines ...", "expected_number": 2416})))


def test_nothing_is_generated_to_be_counted(tokenizer, monkeypatch):
    made, make = [], KeyValues.make
    monkeypatch.setattr(KeyValues, "make", lambda *arguments: made.append(0) or make(*arguments))
    next(KeyValues(num_keys=3, num_samples=5).samples(tokenizer, 10_000))
    assert len(made) == 1
