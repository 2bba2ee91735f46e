"""Mathematical problems that are answered by a worked solution: GSM8K, MATH-500, AIME 2024 and 2025."""

from dataclasses import dataclass
from typing import ClassVar

from kvstitch.evaluation.tasks.data_sets import Hub
from kvstitch.evaluation.tasks.sources import Record

BOX = "Reason step by step, and write the final answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class MathProblems(Hub):
    """A problem, an instruction, and a final answer in a box.

    Args:
        instruction: follows the problem after a blank line; not read when `template` is given.
    """

    instruction: str = BOX
    prompt_field: str = "problem"
    chat: bool = True

    def prompt(self, record: Record, where: str) -> str:
        """See `MappedRecords.prompt`."""
        prompt = super().prompt(record, where)
        return prompt if self.template is not None else f"{prompt}\n\n{self.instruction}"


@dataclass(frozen=True, kw_only=True)
class GSM8K(MathProblems):
    """Grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168); their solutions end in "#### <number>"."""

    name: str = "openai/gsm8k"
    config: str | None = "main"
    split: str = "test"
    revision: str | None = "e53f048856ff4f594e959d75785d2c2d37b678ee"
    prompt_field: str = "question"
    answer_pattern: str | None = r"####\s*(\S+)"
    grader: str = "final_number"
    max_new_tokens: int = 1024


@dataclass(frozen=True, kw_only=True)
class Math500(MathProblems):
    """500 problems of the MATH test set (Hendrycks et al. 2021, arXiv 2103.03874; subset of arXiv 2305.20050)."""

    name: str = "HuggingFaceH4/MATH-500"
    split: str = "test"
    revision: str | None = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    grader: str = "boxed_math"
    max_new_tokens: int = 4096

    facts: ClassVar[tuple[str, ...]] = ("subject", "level")


@dataclass(frozen=True, kw_only=True)
class AIME24(MathProblems):
    """The 30 problems of AIME 2024; answers are integers from 0 to 999."""

    name: str = "HuggingFaceH4/aime_2024"
    split: str = "train"
    revision: str | None = "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"
    grader: str = "boxed_integer"
    max_new_tokens: int = 32768


@dataclass(frozen=True, kw_only=True)
class AIME25(AIME24):
    """The 30 problems of AIME 2025."""

    name: str = "math-ai/aime25"
    split: str = "test"
    revision: str | None = "563bb8404243c5f09de6ec262f2db674fe5bce9b"
