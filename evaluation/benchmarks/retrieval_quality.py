"""What ways to retrieve cost in quality, all against dense, each prompt read once for all of them."""

import dataclasses
import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvstitch.allocators.retrieval import RetrievingAllocator
from kvstitch.evaluation.benchmarks.retrieval_shared import SharedPrompt
from kvstitch.evaluation.benchmarks.retrieval_tables import markdown, overview, published
from kvstitch.evaluation.closed_loop import prefilled_but
from kvstitch.evaluation.models import LoadedModel, load_smollm2, max_positions
from kvstitch.evaluation.options import check_choice, check_counts, check_least, check_types
from kvstitch.evaluation.paper_reading import read_tables
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import CONFIG, RunError, RunFolder, config_hash, write_text
from kvstitch.evaluation.tasks import Needle, Reasoning, Text
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.evaluation.tasks.sources import read_text

GENERATED = {"reasoning": Reasoning, "needle": Needle}
_FOLDER_NOTE = (
    "# Records of bench=community_quality: one a text, piece, length, method and budget; each says how it was made.\n"
)
# Not a run's config.yaml: a report would take the folder for a run that was never finished.
_NOTE_FILE = "benchmark.yaml"


@dataclass(frozen=True)
class QualityBenchmark:
    """A table of methods and budgets over texts: closed loop, token by token, teacher-forced, against the dense model.

    Every record goes to `predictions.jsonl` in `output` as soon as it is there; the same command goes on from what it
    finds, and one with more texts, methods or budgets adds to it. Records of another model, or of a text that has changed
    since, stay where they are and are not used. `tables.md` is written at the end.

    Args:
        methods: allocators by name, None leaves one out; one with a `seed` gets that of the piece.
        texts: "reasoning" and "needle", which are generated, or paths of UTF-8 text files.
        lengths: tokens that are prefilled (generated texts: to within a sentence).
        budgets: slots a kv head.
        pieces: of each text, one after another; a seed each.
        decode_tokens: tokens decoded after the prompt.
        output: folder of the records.
        threads: torch threads.
        press: further arguments of the press, by name.
        paper: tables of a paper, as `read_tables` takes them; no part of what a record depends on.
        paper_rows: the names of the rows that a method is in them.
        model: loads the model.
    """

    methods: Mapping[str, RetrievingAllocator | None]
    texts: Sequence[str] = tuple(GENERATED)
    lengths: Sequence[int] = (4096,)
    budgets: Sequence[int] = (64, 128, 256, 512, 1024)
    pieces: int = 1
    decode_tokens: int = 64
    output: str = "runs/community_quality"
    threads: int = 2
    press: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Any] | None = None
    paper_rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    model: Callable[[], LoadedModel] = load_smollm2

    def __post_init__(self):
        check_types(self, "bench")
        check_least(self, "bench", {"pieces": 1, "threads": 1})
        for name in ("lengths", "budgets"):
            check_counts(f"bench.{name}", getattr(self, name))
        if self.decode_tokens < 2:
            raise ValueError(f"decode_tokens must be at least 2, as each predicts the next, got {self.decode_tokens}")
        if max(self.budgets) >= min(self.lengths):
            raise ValueError(
                f"budgets must be below lengths, or everything is read: got {max(self.budgets)} and {min(self.lengths)}"
            )
        for name, method in self.methods.items():
            if method is not None and not isinstance(method, RetrievingAllocator):
                raise TypeError(
                    f"methods.{name} must be an allocator that retrieves, as {{_target_: "
                    f"kvstitch.allocators.retrieval.PageRetrieval}} makes one, or null, got {method!r}"
                )
        names = [_short(text) for text in self.texts]
        if len(set(names)) < len(names):
            raise ValueError(f"texts must differ in their names, got {', '.join(names)}")
        stated = [row.name for table in read_tables(self.paper) for row in table.rows]
        for method, rows in self.paper_rows.items():
            for row in rows:
                check_choice(f"paper_rows.{method}", row, stated)

    def run(self) -> list[dict[str, Any]]:
        """An overview, a row for each text, length and method; the full tables are printed before it."""
        torch.set_num_threads(self.threads)
        folder = _folder(Path(self.output).expanduser())
        progress = Progress(sys.stderr)
        with folder.opened(_FOLDER_NOTE):
            records = {record["id"]: record for record in folder.read_records()}
            cells = list(self._cells())
            for cell in cells:
                _adopt(records, cell.older_ids)
            wanted = [record_id for cell in cells for record_id in cell.ids.values()]
            progress.note(f"{len(wanted)} records, {len(set(wanted) & set(records))} of them are in {folder} already")
            loaded = None
            for cell in cells:
                if not set(cell.ids.values()) <= set(records):
                    loaded = loaded or self.model()
                    for record in self._measured(loaded, cell, set(records)):
                        folder.append(record)
                        records[record["id"]] = record
                        progress.note(f"{record['id']}: KL {record['metrics']['kl']:.4f}")
            chosen = [records[record_id] for record_id in wanted]
            tables = markdown(chosen) + published(chosen, read_tables(self.paper), self.paper_rows)
            write_text(folder.path / "tables.md", tables)
        print(tables)
        return overview(chosen)

    def _cells(self) -> Iterator["_Cell"]:
        digests = {text: _digest_of(text) for text in self.texts}
        for length, text, piece in itertools.product(self.lengths, self.texts, range(self.pieces)):
            chosen = {name: allocator for name, allocator in self.methods.items() if allocator is not None}
            allocators = {name: _seeded(allocator, piece) for name, allocator in chosen.items()}
            source = {"model": _name_of(self.model), "text_sha256": digests[text]}
            ids, older_ids = {}, {}
            for (name, allocator), budget in itertools.product(allocators.items(), self.budgets):
                readable = f"{_short(text)}-{length}-{piece}-{name}-{budget}"
                record_id, older = (f"{readable}-{self._digest(text, allocator, **more)}" for more in (source, {}))
                ids[name, budget], older_ids[record_id] = record_id, older
            yield _Cell(text, length, piece, allocators, source, ids, older_ids)

    def _digest(self, text: str, allocator: RetrievingAllocator, **source: str | None) -> str:
        """Of everything that a record depends on and that its readable part does not say."""
        options = {field.name: getattr(allocator, field.name) for field in dataclasses.fields(allocator)}
        made_by = {"kind": type(allocator).__name__, "options": options, "press": dict(self.press), "text": text}
        return config_hash(made_by | {"decode_tokens": self.decode_tokens} | source)[:8]

    def _measured(self, loaded: LoadedModel, cell: "_Cell", done: set[str]) -> Iterator[dict[str, Any]]:
        task, sample = self._sample(loaded, cell)
        prompt = SharedPrompt(loaded, task, sample)
        for name, allocator in cell.allocators.items():
            budgets = [budget for budget in self.budgets if cell.ids[name, budget] not in done]
            for budget, metrics in prompt.measure(allocator, budgets, **self.press):
                yield {
                    "id": cell.ids[name, budget],
                    "text": _short(cell.text),
                    "length": cell.length,
                    "prompt_tokens": len(sample.prompt_ids),
                    "piece": cell.piece,
                    "method": name,
                    "budget": budget,
                    **cell.source,
                    "metrics": metrics,
                }

    def _sample(self, loaded: LoadedModel, cell: "_Cell") -> tuple[Task, Sample]:
        total = cell.length + self.decode_tokens
        if cell.text in GENERATED:
            task: Task = GENERATED[cell.text](length=total, num_samples=cell.piece + 1)
        else:
            task = Text(path=cell.text, length=total, num_samples=cell.piece + 1)
        samples = task.samples(loaded.tokenizer, max_positions(loaded.model))
        sample = next(itertools.islice(samples, cell.piece, None))
        return task, prefilled_but(sample, self.decode_tokens)


def _folder(path: Path) -> RunFolder:
    older = path / CONFIG
    if older.exists():
        if older.read_text(encoding="utf-8") != _FOLDER_NOTE:
            raise RunError(f"bench.output={path} is the folder of a run, as {older} says; name another folder")
        # From when records of a benchmark were marked like a run.
        older.replace(path / _NOTE_FILE)
    return RunFolder(path, _NOTE_FILE)


@dataclass(frozen=True)
class _Cell:
    """One prompt and what is to be known of it.

    Args:
        source: model and content of the text, as records tell them.
        ids: of the record of each method and budget.
        older_ids: by id, the one that a record had before model and content were part of it.
    """

    text: str
    length: int
    piece: int
    allocators: Mapping[str, RetrievingAllocator]
    source: Mapping[str, str | None]
    ids: Mapping[tuple[str, int], str]
    older_ids: Mapping[str, str]


def _adopt(records: dict[str, dict[str, Any]], older_ids: Mapping[str, str]) -> None:
    """Takes records that do not say of which model and text they are for what is looked for."""
    for record_id, older_id in older_ids.items():
        if record_id not in records and "model" not in records.get(older_id, {"model": None}):
            records[record_id] = records[older_id]


def _name_of(load: Callable[[], LoadedModel]) -> str:
    """The function that loads a model, with what it is given."""
    given = ""
    if isinstance(load, functools.partial):
        given = ", ".join(
            [*map(repr, load.args), *(f"{key}={value!r}" for key, value in sorted(load.keywords.items()))]
        )
        load = load.func
    return f"{load.__module__}.{load.__qualname__}({given})"


def _digest_of(text: str) -> str | None:
    """Of a file's content; None for what is generated."""
    if text in GENERATED:
        return None
    return hashlib.sha256(read_text(Path(text).expanduser(), "bench.texts").encode()).hexdigest()


def _seeded(allocator: RetrievingAllocator, seed: int) -> RetrievingAllocator:
    has_seed = any(field.name == "seed" for field in dataclasses.fields(allocator))
    return dataclasses.replace(allocator, seed=seed) if has_seed else allocator


def _short(text: str) -> str:
    return text if text in GENERATED else Path(text).stem
