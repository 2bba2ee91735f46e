"""Line retrieval: the number in one of many named lines (LongEval, LMSYS 2023)."""

import random
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks import vocabulary
from kvstitch.evaluation.tasks.encoding import Ask
from kvstitch.evaluation.tasks.fields import text_field, typed_field
from kvstitch.evaluation.tasks.generated import GeneratedOrRead
from kvstitch.evaluation.tasks.records import Parts
from kvstitch.evaluation.tasks.sources import Record


@dataclass(frozen=True, kw_only=True)
class LineRetrieval(GeneratedOrRead):
    """Lines in a drawn order, one of them asked for.

    Args:
        num_lines: lines of a generated record; about 20 tokens each.
        path: a JSON Lines file of LongEval, with `prompt` and `expected_number`, read instead.
    """

    num_lines: int = 100
    grader: str = "first_number"
    max_new_tokens: int = 24

    sizes: ClassVar[tuple[str, ...]] = ("num_lines",)

    def __post_init__(self):
        super().__post_init__()
        if self.num_lines > vocabulary.NUM_NAMES:
            raise ValueError(
                f"task.num_lines must be in [1, {vocabulary.NUM_NAMES}], got {self.num_lines}: there are no more names"
            )

    def make(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase) -> Record:
        """See `Generated.make`."""
        names = list(islice(vocabulary.names(rng), self.num_lines))
        values = [vocabulary.number(rng, 5) for _ in names]
        asked = rng.randrange(self.num_lines)
        lines = "\n".join(f"Line {name}: the register holds <{value}>." for name, value in zip(names, values))
        meta = {"depth": round(asked / max(self.num_lines - 1, 1), 4), "lines": self.num_lines}
        return {
            "context": f"Remember what the register of each line below holds.\n\n{lines}\n\n",
            "question": f"What does the register of line {names[asked]} hold?\nThe register of line {names[asked]} holds <",
            "outputs": [values[asked]],
            "meta": meta,
        }

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        if self.path is None:
            return super().parts(record, where)
        gold = str(typed_field(record, "expected_number", int, "a number", where))
        return Parts(text_field(record, "prompt", where), asks=(Ask("", (gold,)),))
