"""From records to samples: the form that a task gives them, and what happens to those that cannot be used."""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.base import Question, Sample, Scalar, Task
from kvstitch.evaluation.tasks.encoding import Ask, build_sample
from kvstitch.evaluation.tasks.sources import BadRecord, Found, Record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """A record as text: what is prefilled, what is replayed, what is asked, and facts about it."""

    prompt: str
    trace: str = ""
    asks: tuple[Ask, ...] = ()
    meta: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Records(Task):
    """What all tasks made of records have in common: each becomes a sample, or is named and refused or skipped.

    Args:
        on_bad_record: "error" refuses a source with a record that cannot be used, "skip" warns about each, goes on, and
            leaves it in `skipped`.
    """

    on_bad_record: str = "error"

    # Fields that a sample's `meta` takes over where a record has them.
    facts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.on_bad_record not in ("error", "skip"):
            raise ValueError(f"task.on_bad_record must be error or skip, got {self.on_bad_record!r}")

    @abstractmethod
    def stored(self) -> Iterator[Found] | None:
        """The records of a source with an end, as `records` gives them or as far as they are known without a tokenizer;
        `None` where each is generated."""

    def records(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[Found]:
        """Where each record stands, a name for the sample, and the record or what is wrong with it."""
        return self.stored()

    @abstractmethod
    def parts(self, record: Record, where: str) -> Parts:
        """From a record to text.

        Raises:
            BadRecord: a field is missing or of the wrong kind.
        """

    def sample_name(self, record: Record, name: str, where: str) -> str:
        """Id of the sample; `name` is what `records` proposes."""
        return name

    def fitted(self, tokenizer: PreTrainedTokenizerBase, max_positions: int, parts: Parts) -> Parts:
        """The parts made shorter where the task allows it."""
        return parts

    def asked(
        self, context: str, question: str, gold: tuple[str, ...], meta: Mapping[str, Scalar] | None = None
    ) -> Parts:
        """A context and a question about it: in a chat both are the user's, otherwise the question is the cue."""
        prompt, cue = (context + question, "") if self.chat else (context, question)
        return Parts(prompt, asks=(Ask(cue, gold, dict(meta or {})),))

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Task.samples`. Reads on until `num_samples` usable records are found.

        What `check_source` refuses is refused before the first sample. Where the source holds enough and some of its records
        turn out to be of no use (`on_bad_record` "skip"), there are fewer samples, and a warning says so.

        Raises:
            BadRecord: a record cannot be used, and `on_bad_record` is "error".
            ValueError: fewer readable records than `num_samples`, or none that can be used.
        """
        self.check_source()
        self.skipped.clear()
        count, seen = 0, set()
        for where, name, record in self.records(tokenizer):
            if count == self.num_samples:
                return
            try:
                sample = self._sample(tokenizer, max_positions, where, name, record)
                self._require_new(sample.id, seen, where)
            except BadRecord as error:
                if self.on_bad_record == "error":
                    raise
                logger.warning("skipped %s", error)
                self.skipped.append(str(error))
                continue
            count += 1
            yield sample
        if not count:
            raise ValueError(f"{self._source()} holds no usable record, and at least 1 is wanted")
        if self.num_samples is not None and count < self.num_samples:
            logger.warning(
                "%s holds %d usable records, task.num_samples wants %d: the results are of those",
                self._source(), count, self.num_samples,
            )  # fmt: skip

    def check_source(self) -> None:
        """See `Task.check_source`: before hours of work, not after, a source that is too short or holds a bad record is told.

        A prompt that is too long for the model shows when it is reached: it would take a tokenizer, and long texts time.

        Raises:
            BadRecord: one of the first `num_samples` records cannot be used, and `on_bad_record` is "error".
            ValueError: fewer readable records than `num_samples`, or none at all.
        """
        stored = self.stored()
        if stored is None:
            return
        count, seen = 0, set()
        for where, name, record in stored:
            if count == self.num_samples:
                return
            if self.on_bad_record == "error":
                self._require_new(self._parts(where, name, record)[0], seen, where)
            count += not isinstance(record, BadRecord)
        if not count:
            raise ValueError(f"{self._source()} holds no readable record")
        if self.num_samples is not None and count < self.num_samples:
            raise ValueError(
                f"{self._source()} holds {count} readable records, task.num_samples wants {self.num_samples}; "
                "task.num_samples=null takes all"
            )

    @abstractmethod
    def _source(self) -> str:
        """The option that says where the records come from, for messages."""

    def _parts(self, where: str, name: str, record: Record | BadRecord) -> tuple[str, Parts]:
        """Id of the sample and its text.

        Raises:
            BadRecord: one of them cannot be had, or no answer could be right.
        """
        if isinstance(record, BadRecord):
            raise record
        parts = self.parts(record, where)
        try:
            for ask in parts.asks:
                # A gold that no answer could match, such as a word where numbers are graded, is found here and not in the run.
                self.grade(Question(ask.cue, (), ask.gold, self.max_new_tokens, ask.meta), "")
        except ValueError as error:
            raise BadRecord(f"{where}: {error}") from error
        return self.sample_name(record, name, where), parts

    def _sample(self, tokenizer, max_positions: int, where: str, name: str, record: Record | BadRecord) -> Sample:
        name, parts = self._parts(where, name, record)
        facts = {fact: record[fact] for fact in self.facts if fact in record}
        facts = {fact: value for fact, value in facts.items() if isinstance(value, Scalar)}
        try:
            parts = self.fitted(tokenizer, max_positions, parts)
            return build_sample(
                self, tokenizer, max_positions,
                id=name, prompt=parts.prompt, trace=parts.trace, asks=parts.asks, meta=facts | dict(parts.meta),
            )  # fmt: skip
        except ValueError as error:
            raise BadRecord(f"{where}: {error}") from error

    @staticmethod
    def _require_new(name: str, seen: set[str], where: str) -> None:
        if name in seen:
            raise BadRecord(f"{where}: the id {name!r} has occurred before")
        seen.add(name)
