"""What a task hands to an evaluation: token ids, split into what is prefilled, what is replayed and what is asked."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.grading import check_grader, grade
from kvstitch.evaluation.options import check_least, check_types

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Question:
    """One thing asked after the trace.

    Questions of a sample are independent of each other: each is asked of the cache as the trace left it.

    Args:
        cue: text that leads to the answer, e.g. "\\nAnswer:"; may be empty.
        cue_ids: its tokens, fed as given right before the answer is decoded.
        gold: what the grader compares the answer with; several where it accepts or wants several.
        max_new_tokens: most tokens to decode.
        meta: what plots group by, e.g. the depth of a needle.
    """

    cue: str
    cue_ids: tuple[int, ...]
    gold: tuple[str, ...]
    max_new_tokens: int
    meta: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One document of a task.

    Replay: `prompt_ids` are prefilled, `trace_ids` fed teacher-forced through the press, then each question's cue, and
    its answer is decoded greedily. Generate: `input_ids(question)` is the input of `generate`.

    Args:
        id: unique in its task, the same in every run with the same settings; safe as a file name.
        prompt_ids: at least one token.
        trace_ids: may be empty.
        questions: may be empty (language modelling only).
        meta: facts about the document.
    """

    id: str
    prompt_ids: tuple[int, ...]
    trace_ids: tuple[int, ...] = ()
    questions: tuple[Question, ...] = ()
    meta: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def context_tokens(self) -> int:
        """Tokens before a question."""
        return len(self.prompt_ids) + len(self.trace_ids)

    def input_ids(self, question: Question) -> tuple[int, ...]:
        """Everything that comes before the question's answer."""
        return self.prompt_ids + self.trace_ids + question.cue_ids


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A deterministic source of samples and the way to grade answers to them.

    Args:
        num_samples: how many samples; `None`: all that there are (tasks that read files only).
        prefill_tokens: the first so many tokens of prompt and trace are prefilled and the rest is replayed; `None`: the
            prompt, as the task defines it, is prefilled.
        chat: whether the prompt is put into the tokenizer's chat template as a user's message and the trace and the cue
            continue the assistant's answer; otherwise plain text.
        grader: name of a grader, see `kvstitch.evaluation.grading.GRADERS`.
        max_new_tokens: most tokens decoded for an answer.
        seed: of everything that is drawn. Sample i depends on the seed and on i alone.

    Attributes:
        skipped: what was wrong with each record that `samples` passed over so far, and where it stands.
    """

    num_samples: int | None
    prefill_tokens: int | None
    chat: bool
    grader: str
    max_new_tokens: int
    seed: int
    skipped: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self):
        check_types(self, "task")
        check_least(self, "task", {"num_samples": 1, "prefill_tokens": 1, "max_new_tokens": 1, "seed": 0})
        check_grader(self.grader)

    @abstractmethod
    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """Samples in a fixed order.

        Args:
            tokenizer: the evaluated model's.
            max_positions: longest sequence of the model, in tokens (`kvstitch.evaluation.models.max_positions`).

        Raises:
            ValueError: a sample with its longest question and answer exceeds `max_positions`, or cannot be made.
        """

    def check_source(self) -> None:
        """Refuse files that cannot be used, as far as that shows without the model, which then need not be loaded.

        Raises:
            OSError: no such file, or a folder.
            ValueError: what it holds cannot become samples.
        """
        return None

    def require_positions(self, option: str, max_positions: int) -> None:
        """Refuse a size that the model cannot hold before a text of it is made, which may take minutes.

        Args:
            option: tokens of a text, or things in it of a token each at the least.
            max_positions: longest sequence of the model, in tokens.

        Raises:
            ValueError: the size is larger.
        """
        size = getattr(self, option)
        if size > max_positions:
            raise ValueError(
                f"task.{option}={size} needs {size} positions for the text alone, but the model has {max_positions}: lower "
                f"task.{option}, or take a model with a longer context"
            )

    def grade(self, question: Question, prediction: str) -> float:
        """1 right, 0 wrong, in between where the grader gives credit for parts."""
        return grade(self.grader, prediction, question.gold)
