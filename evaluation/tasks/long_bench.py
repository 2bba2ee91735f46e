"""LongBench v2 (multiple choice), and the English subsets of LongBench with RepoBench-P among them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvstitch.evaluation.options import check_types
from kvstitch.evaluation.tasks.data_sets import Hub
from kvstitch.evaluation.tasks.fields import field, gold_field, text_field
from kvstitch.evaluation.tasks.long_bench_subsets import SUBSETS, Subset
from kvstitch.evaluation.tasks.records import Parts
from kvstitch.evaluation.tasks.sources import Found, Record, settled_name, zip_records


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(Hub):
    """503 questions with four choices about contexts of 8k to 2M words (arXiv 2412.15204), answered without reasoning."""

    name: str = "zai-org/LongBench-v2"
    split: str = "train"
    revision: str | None = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"
    truncate_middle: bool = True
    chat: bool = True
    grader: str = "choice_letter"
    max_new_tokens: int = 128

    facts: ClassVar[tuple[str, ...]] = ("domain", "sub_domain", "difficulty", "length")

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        if self.template is not None:
            return super().parts(record, where)
        context = f"A text is given, then a question about it.\n\n<text>\n{text_field(record, 'context', where).strip()}\n</text>"
        choices = "".join(f"({name}) {text_field(record, f'choice_{name}', where).strip()}\n" for name in "ABCD")
        question = (
            f"\n\nQuestion: {text_field(record, 'question', where).strip()}\n{choices}\n"
            'Choose one of A, B, C and D. Answer in this form: "The correct answer is (X)".'
        )
        return self.asked(context, question + ("" if self.chat else "\n\n"), self.gold(record, where))


@dataclass(frozen=True, kw_only=True)
class LongBench(Hub):
    """One English subset of LongBench (arXiv 2308.14508).

    Grader and number of new tokens are the subset's own unless they are given. Prompts are worded anew, so absolute scores
    need not be those of the paper; `template` and `cue` take any other wording. Subsets with worked examples and code never
    use the chat template, as in the original.

    Args:
        subset: see `kvstitch.evaluation.tasks.long_bench_subsets.SUBSETS`; `None`: what the file of `path` is called, or
            "qasper" without one.
        name: hub id of a data set with `data.zip`, as the original has it (its loading script is not run).
    """

    subset: str | None = None
    name: str = "zai-org/LongBench"
    split: str = "test"
    revision: str | None = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
    answer_field: str | None = "answers"
    truncate_middle: bool = True
    chat: bool = True
    grader: str | None = None
    max_new_tokens: int | None = None

    facts: ClassVar[tuple[str, ...]] = ("length", "dataset")

    def __post_init__(self):
        check_types(self, "task")
        subset = settled_name(self, "subset", "qasper", SUBSETS)
        object.__setattr__(self, "subset", subset)
        own = SUBSETS[subset]
        object.__setattr__(self, "chat", self.chat and own.chat)
        for name in ("grader", "max_new_tokens"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(own, name))
        super().__post_init__()

    def stored(self) -> Iterator[Found]:
        """See `Records.stored`."""
        member = f"data/{self.subset}.jsonl"
        if self.path is not None and self.path.endswith(".zip"):
            yield from zip_records(Path(self.path).expanduser(), member)
        elif self.path is not None:
            yield from super().stored()
        else:
            yield from zip_records(self._archive(), member)

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        if self.template is not None:
            return super().parts(record, where)
        subset: Subset = SUBSETS[self.subset]
        context, question = (text_field(record, name, where) for name in ("context", "input"))
        return self.asked(
            subset.context.replace("{context}", context),
            subset.question.replace("{input}", question),
            self.gold(record, where),
        )

    def gold(self, record: Record, where: str) -> tuple[str, ...]:
        """The answers; for classification the right class, then the others."""
        answers = super().gold(record, where)
        if self.grader != "class_label":
            return answers
        classes = gold_field(record, "all_classes", None, where) if field(record, "all_classes", where) else ()
        return (answers[0], *(name for name in classes if name != answers[0]))

    def _archive(self) -> Path:
        import huggingface_hub

        try:
            return Path(
                huggingface_hub.hf_hub_download(self.name, "data.zip", repo_type="dataset", revision=self.revision)
            )
        except (OSError, ValueError) as error:
            raise ValueError(self._not_loaded(error)) from error


@dataclass(frozen=True, kw_only=True)
class RepoBenchP(LongBench):
    """RepoBench-P (arXiv 2306.03091) as LongBench has it: the next line of a file, given others of its repository."""

    subset: str | None = "repobench-p"
