"""Language modelling on any text file: pieces of equal length, nothing asked."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_least
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.evaluation.tasks.encoding import encode, split_sample
from kvstitch.evaluation.tasks.sources import read_text


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Consecutive pieces of a text file, from its beginning, none overlapping; what is left at the end is not used.

    Args:
        path: UTF-8 text file.
        length: tokens of a piece, the tokenizer's begin token included.
    """

    path: str
    length: int = 2560
    num_samples: int | None = 4
    prefill_tokens: int | None = 512
    chat: bool = False
    grader: str = "exact"
    max_new_tokens: int = 1
    seed: int = 42

    def __post_init__(self):
        super().__post_init__()
        if self.chat:
            raise ValueError("task.chat=true has no meaning for task=text: nobody asks or answers")
        check_least(self, "task", {"length": 2})

    def check_source(self) -> None:
        """See `Task.check_source`."""
        read_text(Path(self.path))

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Task.samples`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not UTF-8, shorter than what is asked for, or `length` exceeds `max_positions`.
        """
        self.require_positions("length", max_positions)
        path = Path(self.path).expanduser()
        begin = encode(tokenizer, "", special=True)
        ids = encode(tokenizer, read_text(path))
        step = self.length - len(begin)
        available = len(ids) // step
        count = available if self.num_samples is None else self.num_samples
        if not available:
            raise ValueError(
                f"task.path={self.path}: {len(ids)} tokens are no piece of task.length={self.length}; lower task.length to "
                f"{len(ids) + len(begin)} or less, or take a longer text"
            )
        if count > available:
            raise ValueError(
                f"task.path={self.path}: {len(ids)} tokens make {available} pieces of task.length={self.length}, and "
                f"task.num_samples={self.num_samples} wants {count}; lower either"
            )
        for index in range(count):
            piece = [*begin, *ids[index * step : (index + 1) * step]]
            yield split_sample(self, max_positions, id=f"{path.stem}-{index:04d}", prompt_ids=piece)
