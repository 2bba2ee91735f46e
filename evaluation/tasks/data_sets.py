"""Records whose fields the options name: local files, or data sets of the Hugging Face hub."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.encoding import Ask, prompt_room, truncate_middle
from kvstitch.evaluation.tasks.fields import field, fill, gold_field, template_fields, text_field
from kvstitch.evaluation.tasks.records import Parts, Records
from kvstitch.evaluation.tasks.sources import Found, Record, file_records


@dataclass(frozen=True, kw_only=True)
class MappedRecords(Records):
    """Records whose fields the options name, with at most one question each.

    Args:
        prompt_field: field that holds the prompt; not read when `template` is given.
        template: prompt with {field} where a field goes, doubled braces for braces; fields that are not text are
            written as JSON.
        trace_field: field replayed teacher-forced after the prompt, e.g. a worked solution; `None`: no trace.
        cue: text that leads to the answer, with {field} as in `template`; may be empty.
        answer_field: text, number or list of either; `None`: nothing is asked.
        answer_pattern: regular expression whose first group is the answer inside the field; `None`: the whole field.
        id_field: field that names the sample; `None`: the record's number.
        truncate_middle: a prompt that is too long loses its middle, and the sample's `meta` says how many tokens
            (`removed_tokens`); otherwise such a record is a bad one.
        max_prompt_tokens: with `truncate_middle`, most tokens of a prompt, chat template not counted; `None`: what the
            model has room for.
    """

    prompt_field: str = "prompt"
    template: str | None = None
    trace_field: str | None = None
    cue: str = ""
    answer_field: str | None = "answer"
    answer_pattern: str | None = None
    id_field: str | None = None
    truncate_middle: bool = False
    max_prompt_tokens: int | None = None
    num_samples: int | None = None
    prefill_tokens: int | None = None
    chat: bool = False
    grader: str = "contains_any"
    max_new_tokens: int = 32
    seed: int = 42

    def __post_init__(self):
        super().__post_init__()
        if self.answer_pattern is not None:
            _check_pattern(self.answer_pattern)
        if self.max_prompt_tokens is not None and not (self.truncate_middle and self.max_prompt_tokens >= 2):
            raise ValueError(
                f"task.max_prompt_tokens={self.max_prompt_tokens} must be at least 2 and needs task.truncate_middle=true"
            )
        for name in ("template", "cue"):
            template_fields(getattr(self, name) or "", name)

    def parts(self, record: Record, where: str) -> Parts:
        """From fields to text; data sets whose records have a form of their own override it."""
        prompt = self.prompt(record, where)
        trace = "" if self.trace_field is None else text_field(record, self.trace_field, where)
        if self.answer_field is None:
            return Parts(prompt, trace)
        return Parts(prompt, trace, (Ask(fill(self.cue, record, where), self.gold(record, where)),))

    def prompt(self, record: Record, where: str) -> str:
        """What `template`, or else `prompt_field`, gives."""
        if self.template is not None:
            return fill(self.template, record, where)
        return text_field(record, self.prompt_field, where)

    def gold(self, record: Record, where: str) -> tuple[str, ...]:
        """What `answer_field` and `answer_pattern` give."""
        return gold_field(record, self.answer_field, self.answer_pattern, where)

    def sample_name(self, record: Record, name: str, where: str) -> str:
        """See `Records.sample_name`."""
        return name if self.id_field is None else quote(str(field(record, self.id_field, where)), safe=" ")

    def fitted(self, tokenizer: PreTrainedTokenizerBase, max_positions: int, parts: Parts) -> Parts:
        """See `Records.fitted`."""
        if not self.truncate_middle:
            return parts
        room = prompt_room(self, tokenizer, max_positions, trace=parts.trace, asks=parts.asks)
        prompt, removed = truncate_middle(tokenizer, parts.prompt, min(room, self.max_prompt_tokens or room))
        return replace(parts, prompt=prompt, meta={**parts.meta, "removed_tokens": removed})


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"task.answer_pattern={pattern!r} is no regular expression: {error}") from error
    if groups < 1:
        raise ValueError(f"task.answer_pattern={pattern!r} needs a group (...) around the answer")


@dataclass(frozen=True, kw_only=True)
class JsonLines(MappedRecords):
    """A local file with one JSON object a line; also one JSON list of objects, or Parquet.

    Args:
        path: UTF-8 file, or a Parquet file by its suffix.
    """

    path: str

    def stored(self) -> Iterator[Found]:
        """See `Records.stored`."""
        return file_records(Path(self.path))

    def _source(self) -> str:
        return f"task.path={self.path}"


@dataclass(frozen=True, kw_only=True)
class Hub(MappedRecords):
    """A data set of the Hugging Face hub (or a local folder of data files), through `datasets`; no remote code.

    Args:
        name: hub id or folder.
        config: configuration of the data set; `None`: its only or default one.
        split: e.g. "test".
        revision: branch, tag or commit; `None`: its main branch.
        path: a local file with the same records, read instead; see `JsonLines`.
    """

    name: str
    split: str
    config: str | None = None
    revision: str | None = None
    path: str | None = None

    def stored(self) -> Iterator[Found]:
        """See `Records.stored`."""
        if self.path is not None:
            yield from file_records(Path(self.path))
            return
        import datasets  # takes seconds, and only this needs it

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(self._not_loaded(error)) from error
        stem = quote(self.name.strip("/").split("/")[-1], safe=" ")
        for number, row in enumerate(rows):
            yield f"{self._source()} record {number}", f"{stem}-{number:06d}", row

    def _not_loaded(self, error: Exception) -> str:
        hint = "" if Path(self.name).exists() else " (task.path=<file> reads the same records from a local file)"
        return f"{self._source()} could not be loaded: {error}{hint}"

    def _source(self) -> str:
        return f"task.name={self.name} task.split={self.split}" if self.path is None else f"task.path={self.path}"
