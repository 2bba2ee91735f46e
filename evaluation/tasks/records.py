"""Samples from records: local JSON Lines, or data sets of the Hugging Face hub."""

import difflib
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any
from urllib.parse import quote

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.evaluation.tasks.encoding import Ask, build_sample

logger = logging.getLogger(__name__)


class BadRecord(ValueError):
    """A record that cannot become a sample; the message says where it stands and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Records(Task):
    """What local files and hub data sets have in common: from fields to a sample with at most one question.

    Args:
        prompt_field: field that holds the prompt; not read when `template` is given.
        template: prompt with {field} where a field goes, doubled braces for braces; fields that are not text are
            written as JSON.
        trace_field: field replayed teacher-forced after the prompt, e.g. a worked solution; `None`: no trace.
        cue: text that leads to the answer, with {field} as in `template`; may be empty.
        answer_field: text, number or list of either; `None`: nothing is asked.
        answer_pattern: regular expression whose first group is the answer inside the field; `None`: the whole field.
        id_field: field that names the sample; `None`: the record's number.
        on_bad_record: "refuse" stops at the first record that cannot be used, "skip" warns about each and goes on.
    """

    prompt_field: str = "prompt"
    template: str | None = None
    trace_field: str | None = None
    cue: str = ""
    answer_field: str | None = "answer"
    answer_pattern: str | None = None
    id_field: str | None = None
    on_bad_record: str = "refuse"
    num_samples: int | None = None
    prefill_tokens: int | None = None
    chat: bool = False
    grader: str = "contains_any"
    max_new_tokens: int = 32
    seed: int = 42

    def __post_init__(self):
        super().__post_init__()
        if self.on_bad_record not in ("refuse", "skip"):
            raise ValueError(f"task.on_bad_record must be refuse or skip, got {self.on_bad_record!r}")
        if self.answer_pattern is not None and re.compile(self.answer_pattern).groups < 1:
            raise ValueError(f"task.answer_pattern={self.answer_pattern!r} needs a group (...) around the answer")
        for name in ("template", "cue"):
            _template_fields(getattr(self, name) or "", name)

    @abstractmethod
    def records(self) -> Iterator[tuple[str, str, Mapping[str, Any] | BadRecord]]:
        """Where the record stands (for messages), its name if it has no `id_field`, and the record or what is wrong."""

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Task.samples`. Reads on until `num_samples` usable records are found.

        Raises:
            BadRecord: a record cannot be used, and `on_bad_record` is "refuse".
            ValueError: fewer usable records than `num_samples`, or none.
        """
        count, seen = 0, set()
        for where, name, record in self.records():
            if count == self.num_samples:
                return
            try:
                sample = self._sample(tokenizer, max_positions, where, name, record)
                if sample.id in seen:
                    raise BadRecord(f"{where}: the id {sample.id!r} has occurred before")
            except BadRecord as error:
                if self.on_bad_record == "refuse":
                    raise
                logger.warning("skipped %s", error)
                continue
            seen.add(sample.id)
            count += 1
            yield sample
        if not count or count < (self.num_samples or 0):
            wanted = "at least 1" if self.num_samples is None else self.num_samples
            raise ValueError(f"{self._source()} holds {count} usable records, task.num_samples wants {wanted}")

    @abstractmethod
    def _source(self) -> str:
        """The option that says where the records come from, for messages."""

    def _sample(self, tokenizer, max_positions, where: str, name: str, record: Mapping[str, Any] | BadRecord) -> Sample:
        if isinstance(record, BadRecord):
            raise record
        prompt = (
            _text(record, self.prompt_field, where) if self.template is None else _fill(self.template, record, where)
        )
        trace = "" if self.trace_field is None else _text(record, self.trace_field, where)
        asks = []
        if self.answer_field is not None:
            asks.append(Ask(_fill(self.cue, record, where), self._gold(record, where)))
        if self.id_field is not None:
            name = quote(str(_field(record, self.id_field, where)), safe=" ")
        try:
            return build_sample(self, tokenizer, max_positions, id=name, prompt=prompt, trace=trace, asks=asks)
        except ValueError as error:
            raise BadRecord(f"{where}: {error}") from error

    def _gold(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        value = _field(record, self.answer_field, where)
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, str | int | float) for one in values):
            raise BadRecord(
                f"{where}: field {self.answer_field!r} must hold text, a number or a list of them, got {_short(value)}"
            )
        gold = []
        for text in map(str, values):
            if self.answer_pattern is not None:
                found = re.search(self.answer_pattern, text)
                if found is None:
                    raise BadRecord(
                        f"{where}: {self.answer_field!r} does not match {self.answer_pattern!r}: {_short(text)}"
                    )
                text = found.group(1).strip()
            gold.append(text)
        return tuple(gold)


@dataclass(frozen=True, kw_only=True)
class JsonLines(Records):
    """A local file with one JSON object a line; blank lines are passed over.

    Args:
        path: UTF-8 file.
    """

    path: str

    def records(self) -> Iterator[tuple[str, str, Mapping[str, Any] | BadRecord]]:
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{self._source()}: no such file")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield where, f"{path.stem}-{number:06d}", _parse(line, where)

    def _source(self) -> str:
        return f"task.path={self.path}"


@dataclass(frozen=True, kw_only=True)
class Hub(Records):
    """A data set of the Hugging Face hub (or a local folder of data files), through `datasets`; no remote code.

    Args:
        name: hub id or folder.
        config: configuration of the data set; `None`: its only or default one.
        split: e.g. "test".
        revision: branch, tag or commit; `None`: its main branch.
    """

    name: str
    split: str
    config: str | None = None
    revision: str | None = None

    def records(self) -> Iterator[tuple[str, str, Mapping[str, Any] | BadRecord]]:
        import datasets  # takes seconds, and only this task needs it

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self._source()} could not be loaded: {error}") from error
        stem = quote(self.name.strip("/").split("/")[-1], safe=" ")
        for number, row in enumerate(rows):
            yield f"{self._source()} record {number}", f"{stem}-{number:06d}", row

    def _source(self) -> str:
        return f"task.name={self.name} task.split={self.split}"


def _parse(line: bytes, where: str) -> Mapping[str, Any] | BadRecord:
    try:
        record = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return BadRecord(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return BadRecord(f"{where}: not JSON: {error.msg} at column {error.colno}")
    if not isinstance(record, dict):
        return BadRecord(f"{where}: must be a JSON object, got {_short(record)}")
    return record


def _field(record: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in record:
        nearest = difflib.get_close_matches(name, record, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise BadRecord(f"{where}: no field {name!r}, it has {', '.join(map(repr, record))}{hint}")
    return record[name]


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = _field(record, name, where)
    if not isinstance(value, str):
        raise BadRecord(f"{where}: field {name!r} must hold text, got {_short(value)}")
    return value


def _template_fields(template: str, option: str) -> list[str]:
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"task.{option}={template!r}: {error}; write {{{{ and }}}} for braces") from error
    for name in fields:
        # "{a.b}" and "{a[0]}" would reach into Python objects.
        if not name or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"task.{option}={template!r}: {{{name}}} is not the name of a field")
    return fields


def _fill(template: str, record: Mapping[str, Any], where: str) -> str:
    values = {}
    for name in _template_fields(template, "template"):
        value = _field(record, name, where)
        values[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return template.format_map(values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
