"""Many methods and budgets from one prompt: the same figures as one by one, resumed, in tables."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from transformers import LlamaConfig, LlamaForCausalLM

import kvstitch.configs
from kvstitch.allocators.retrieval import (
    ClusterRetrieval,
    CommunityRetrieval,
    GraphEviction,
    OracleRetrieval,
    PageRetrieval,
    WindowRetrieval,
)
from kvstitch.evaluation.benchmarks import retrieval_quality
from kvstitch.evaluation.benchmarks.retrieval_quality import QualityBenchmark
from kvstitch.evaluation.benchmarks.retrieval_shared import SharedPrompt
from kvstitch.evaluation.benchmarks.retrieval_tables import markdown, verdicts
from kvstitch.evaluation.closed_loop import closed_loop_sample
from kvstitch.evaluation.models import LoadedModel
from kvstitch.evaluation.paper_reading import read_tables
from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.report import find_runs
from kvstitch.evaluation.tasks.base import Question, Sample
from kvstitch.presses import RetrievalPress

TOKENS = torch.randint(3, 90, (130,), generator=torch.Generator().manual_seed(0)).tolist()
SAMPLE = Sample("a", tuple(TOKENS[:110]), tuple(TOKENS[110:]), (Question("", (5, 6), ("x",), 3),))
COMMUNITY = CommunityRetrieval(top_k=3, refine_steps=2, replacement=2)
OPTIONS = {"num_sinks": 2}


class Tokenizer:
    eos_token_id = pad_token_id = 0

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


class Grader:
    def grade(self, question, prediction):
        return float(len(prediction.split()) == question.max_new_tokens)

    def samples(self, tokenizer, max_positions):
        for index in range(4):
            yield dataclasses.replace(SAMPLE, id=str(index), prompt_ids=SAMPLE.prompt_ids[index:])


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    model.generation_config.eos_token_id = None
    return LoadedModel(model, Tokenizer())


@pytest.mark.parametrize(
    "allocator",
    [
        COMMUNITY,
        CommunityRetrieval.paper(top_k=3),
        # Lloyd steps would begin from other members, as the storage of the second budget is in order already.
        dataclasses.replace(COMMUNITY, growth="nearest", refresh=5),
        dataclasses.replace(COMMUNITY, levels=2, target_tokens=2, min_mean_tokens=2, growth_tokens=1),
        dataclasses.replace(COMMUNITY, levels="auto", target_tokens=2, min_mean_tokens=2, growth_tokens=1),
        ClusterRetrieval(tokens_per_cluster=8, steps=2),
        PageRetrieval(page_size=8),
        OracleRetrieval(select="query_head"),
        WindowRetrieval(),
        GraphEviction(top_k=3),
    ],
    ids=lambda allocator: "-".join(
        [type(allocator).__name__, *(str(getattr(allocator, x, "")) for x in ("growth", "levels"))]
    ),
)
def test_a_shared_prompt_gives_what_each_press_gives_alone(loaded, allocator):
    # The first two budgets have as many recent tokens, the last has fewer.
    budgets = (40, 43, 24)
    options = OPTIONS | {"num_recent": None}
    found = dict(SharedPrompt(loaded, Grader(), SAMPLE).measure(allocator, budgets, **options))
    assert list(found) == list(budgets)
    for budget in budgets:
        press = RetrievalPress(allocator, budget, **options)
        alone = closed_loop_sample(loaded, press, Grader(), SAMPLE, speed_tokens=0).record["metrics"]
        assert alone["kl"] > 1e-5
        for name in ("kl", "nll", "top1_agreement", "mass_recall", "read_slots", "read_bytes", "accuracy"):
            assert found[budget][name] == pytest.approx(alone[name], rel=1e-5), (budget, name)
        for name in ("modularity", "communities"):
            assert found[budget][name] == (None if alone[name] is None else pytest.approx(alone[name])), name


@pytest.fixture
def benchmark(loaded, tmp_path, monkeypatch):
    tasks = {"one": lambda **options: Grader(), "two": lambda **options: Grader()}
    monkeypatch.setattr(retrieval_quality, "GENERATED", tasks)
    methods = {"recommended": COMMUNITY, "oracle": OracleRetrieval(), "quest": PageRetrieval(page_size=8)}

    def make(**options):
        settings = dict(
            methods=methods, texts=("one",), lengths=(110,), budgets=(32, 48), decode_tokens=16,
            output=str(tmp_path / "out"), threads=torch.get_num_threads(), press=OPTIONS, model=lambda: loaded,
        )  # fmt: skip
        return QualityBenchmark(**(settings | options))

    return make


def test_a_second_command_measures_only_what_is_new(benchmark, monkeypatch, capsys):
    rows = benchmark().run()
    assert [row["method"] for row in rows] == ["recommended", "oracle", "quest"] and all(row["32"] > 0 for row in rows)
    measured = []
    real = SharedPrompt.measure
    monkeypatch.setattr(
        SharedPrompt, "measure", lambda self, allocator, budgets, **o: measured.append(list(budgets)) or real(self, allocator, budgets, **o)
    )  # fmt: skip
    assert benchmark().run() == rows and measured == []
    more = benchmark(texts=("one", "two"), budgets=(32, 48, 64)).run()
    assert measured == [[64]] * 3 + [[32, 48, 64]] * 3
    assert [row["32"] for row in more[:3]] == [row["32"] for row in rows]
    assert "## 110 tokens prefilled, 2 prompts: one, two" in capsys.readouterr().out


def test_a_report_takes_its_folder_for_no_run(benchmark, tmp_path):
    rows = benchmark(budgets=(32,)).run()
    assert find_runs([tmp_path]) == ([], [])
    # A folder from before is taken over with its records.
    (tmp_path / "out" / "benchmark.yaml").replace(tmp_path / "out" / "config.yaml")
    before = (tmp_path / "out" / "predictions.jsonl").read_bytes()
    assert benchmark(budgets=(32,)).run() == rows and find_runs([tmp_path]) == ([], [])
    assert (tmp_path / "out" / "predictions.jsonl").read_bytes() == before
    # That of a run is not.
    (tmp_path / "out" / "config.yaml").write_text("budget: 1\n")
    with pytest.raises(RunError, match="bench.output=.*out is the folder of a run, as .*config.yaml says"):
        benchmark(budgets=(32,)).run()


def test_another_model_is_measured_anew(benchmark, loaded, tmp_path):
    """In the same folder, where the first one's records stay."""
    first = benchmark(budgets=(32,)).run()
    path, models = tmp_path / "out" / "predictions.jsonl", []

    def load(scale, name="tiny"):
        models.append(scale)
        for parameter in loaded.model.parameters():
            parameter.data.mul_(scale)
        return loaded

    other = benchmark(budgets=(32,), model=functools.partial(load, scale=1.1))
    second = other.run()
    assert models == [1.1] and [row["32"] for row in second] != [row["32"] for row in first]
    assert other.run() == second and benchmark(budgets=(32,)).run() == first and models == [1.1]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["id"] for record in records}) == len(records) == 6
    assert records[-1]["model"].endswith("load(scale=1.1)") and records[-1]["text_sha256"] is None


def test_a_text_that_changed_is_measured_anew(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval_quality, "Text", lambda **options: Grader())
    text, path = tmp_path / "book.txt", tmp_path / "out" / "predictions.jsonl"
    for content, count in (("once", 3), ("once", 3), ("twice", 6), ("once", 6)):
        text.write_text(content)
        benchmark(texts=(str(text),), budgets=(32,)).run()
        assert len(path.read_text().splitlines()) == count
    assert json.loads(path.read_text().splitlines()[0])["text_sha256"] == hashlib.sha256(b"once").hexdigest()
    with pytest.raises(FileNotFoundError, match="bench.texts=.*gone.txt"):
        benchmark(texts=(str(tmp_path / "gone.txt"),)).run()


def test_records_that_do_not_say_of_what_they_are_still_count(benchmark, tmp_path):
    """Those made before model and text were part of them."""
    rows, path = benchmark(budgets=(32,)).run(), tmp_path / "out" / "predictions.jsonl"
    older = {new: old for cell in benchmark(budgets=(32,))._cells() for new, old in cell.older_ids.items()}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["id"] = older[record["id"]]
        del record["model"], record["text_sha256"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    before = path.read_bytes()
    assert benchmark(budgets=(32,)).run() == rows and path.read_bytes() == before


def test_older_ids_are_what_they_were():
    oracle = QualityBenchmark(
        {"oracle": OracleRetrieval()}, ("needle",), (110,), (32,), decode_tokens=16, press=OPTIONS
    )
    assert list(next(oracle._cells()).older_ids.values()) == ["needle-110-0-oracle-32-4846d882"]


def test_pieces_have_seeds_of_their_own(benchmark, tmp_path):
    benchmark(pieces=2, budgets=(32,)).run()
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 6 and (tmp_path / "out" / "tables.md").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budgets": (64, 110)}, "budgets must be below lengths"),
        ({"pieces": 0}, "pieces must be at least 1, got 0"),
        ({"decode_tokens": 1}, "decode_tokens must be at least 2"),
        ({"texts": ("a/x.txt", "b/x.txt")}, "texts must differ in their names, got x, x"),
        ({"paper": {"source": "x"}}, "paper lacks tables; paper takes source, tables"),
        ({"paper_rows": {"full": ["x"]}}, "paper_rows.full must be one of"),
    ],
)
def test_what_makes_no_sense_is_refused(benchmark, options, message):
    with pytest.raises(ValueError, match=message):
        benchmark(**options)


def test_a_method_that_is_no_allocator_is_named(benchmark):
    with pytest.raises(TypeError, match="methods.ridge0 must be an allocator that retrieves.*got {'3'"):
        benchmark(methods={"ridge0": {"3": PageRetrieval()}})


def record(method, kl, text="book", budget=256, length=4096, piece=0, **metrics):
    values = {
        "kl": kl,
        "top1_agreement": 0.9,
        "read_slots": budget,
        "dense_read_bytes": 2e6,
        "modularity": None,
    } | metrics
    return {"method": method, "text": text, "budget": budget, "length": length, "piece": piece, "metrics": values}


PAPER = {
    "source": "Somebody (arXiv 0000.00000)",
    "tables": [
        {
            "table": "ablation", "model": ["4B", "8B"], "task": "LongBench v2", "metric": "answers right", "unit": "%",
            "our_metrics": ["kl"], "dense": [27.4, 31.4],
            "rows": {name: {"match": {"press": "community"}, "figures": cell}
                     for name, cell in (("full", [27.4, 31.1]), ("λ = 0", None), ("left out", [1.5, 2.5]))},
        }
    ],
}  # fmt: skip


def test_what_a_paper_states_stands_behind_the_tables(benchmark, tmp_path, capsys):
    plain = benchmark(budgets=(32,)).run()
    before = (tmp_path / "out" / "predictions.jsonl").read_bytes()
    named = {"recommended": ["full"], "oracle": ["λ = 0"], "not measured": ["left out"]}
    assert benchmark(budgets=(32,), paper=PAPER, paper_rows=named).run() == plain
    # It is no part of what a record depends on.
    assert (tmp_path / "out" / "predictions.jsonl").read_bytes() == before
    text = (tmp_path / "out" / "tables.md").read_text()
    kl = plain[0]["32"]
    assert text.partition("Published: ")[2] == (
        "Somebody (arXiv 0000.00000), ablation. The paper's: 4B / 8B; LongBench v2. Another model and other data than here, so that "
        "only the order of methods compares\n\n"
        "| method here | budget here | in the paper | paper: answers right, % | here: KL |\n| --- | ---: | ---: | ---: | ---: |\n"
        f"| dense |  | dense | 27.4 / 31.4 | – |\n| recommended | 32 | full | 27.4 / 31.1 | {kl:.4f} |\n"
    )
    assert text in capsys.readouterr().out


def test_a_paper_without_a_row_that_was_measured_is_left_out(benchmark, tmp_path):
    benchmark(budgets=(32,), paper=PAPER, paper_rows={"not measured": ["full"]}).run()
    assert "Published" not in (tmp_path / "out" / "tables.md").read_text()


def test_the_ablation_of_the_configuration_has_the_papers_rows():
    with initialize_config_dir(str(Path(kvstitch.configs.__file__).parent), version_base="1.3"):
        bench = compose("bench", overrides=["bench=community_ablation", "bench.model=null"]).bench
        made = instantiate(bench, _convert_="all")
        base = compose("bench", overrides=["bench=community_quality"]).bench
    assert base.paper is None and not base.paper_rows
    rows = {row.name: row for table in read_tables(made.paper) for row in table.rows}
    # Every row of the paper is some method's, and each method's options are what the row wants.
    assert {name for names in made.paper_rows.values() for name in names} == set(rows)
    for method, names in made.paper_rows.items():
        options = {f"allocator.{key}": value for key, value in dataclasses.asdict(made.methods[method]).items()}
        for name in names:
            assert rows[name].fits(options | {"press": "community", "allocator": "community_paper"}), (method, name)


def test_a_row_of_the_ablation_changes_one_thing():
    """Only clusters of keys, which have no modularity, cannot grow as the rest does."""
    with initialize_config_dir(str(Path(kvstitch.configs.__file__).parent), version_base="1.3"):
        ablation, quality = (
            instantiate(
                compose("bench", overrides=[f"bench={name}", "bench.model=null"]).bench, _convert_="all"
            ).methods
            for name in ("community_ablation", "community_quality")
        )
    rows = {name: allocator for name, allocator in ablation.items() if allocator is not None}
    full = dataclasses.asdict(rows.pop("full"))
    changed = lambda allocator, base: {k for k, v in dataclasses.asdict(allocator).items() if v != base[k]}
    assert {name: len(changed(row, full)) for name, row in rows.items()} == {
        name: 2 if name == "kmeans" else 1 for name in rows
    }
    # The graph beside k-means: no Lloyd steps, or k-means with as many clusters.
    recommended = dataclasses.asdict(quality["recommended"])
    assert changed(quality["graph_no_lloyd"], recommended) == {"refine_steps"}
    assert changed(quality["kmeans_like_recommended"], recommended) == {"partition", "metric"}


def test_tables_and_verdicts():
    records = [
        record("oracle", 0.01), record("quest", 0.11), record("paper", 0.3), record("recommended", 0.02, modularity=0.5),
        record("oracle", 0.1, "code"), record("quest", 0.2, "code"), record("paper", 0.15, "code"),
        record("recommended", 0.16, "code", modularity=0.7), record("recommended", 0.04, piece=1),
    ]  # fmt: skip
    assert verdicts(records) == [
        "recommended beats quest in KL everywhere",
        "recommended beats paper in KL except on code at 256",
        "recommended closes 80 % of the KL gap between quest and oracle at 256 on book",
        "recommended closes 40 % of the KL gap between quest and oracle at 256 on code",
    ]
    text = markdown(records)
    assert "| recommended | 0.0733 ± 0.0757 |" in text
    assert "| recommended | 0.0300 / 90.0 |" in text
    assert "| method | KL | top-1 % | slots | modularity |" in text and "| quest | 0.1550 | 90.0 | 256 | – |" in text
    assert "dense reads 2.0 MB a step" in text
