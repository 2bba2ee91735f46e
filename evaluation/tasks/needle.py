"""Needles in a haystack: facts hidden in unrelated prose and asked for at its end (single and multi key)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_least
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.evaluation.tasks.encoding import Ask, build_sample, encode
from kvstitch.evaluation.tasks.prose import NAMES, prose

_PROMPT = "Some facts are hidden in the text below. Keep them in mind, for they will be asked about.\n\n"
# The cue ends as the needle begins. A 135M model finds four of four such needles, but two of four whose sentence is
# "The secret code of the amber is 8020." and which are asked for by a question.
_NEEDLE = "Remember that {name} = {value}."
_CUE = "\nAnswer. As stated above: Remember that {name} ="
_GOLDEN = 0.618033988749895


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Numbers called by `num_keys` names at depths spread over the text, each of them asked for.

    With one key there is nothing to mix up (single); with several, the others distract from the one that is asked for
    (multi key). The depths differ from sample to sample, and together cover the text evenly.

    Args:
        length: tokens of the text, reached to within a sentence.
        num_keys: facts in each text.
        num_questions: how many of them are asked for, at depths from early to late; `None`: one of every two neighbours.
        digits: of each number.
    """

    length: int = 2560
    num_keys: int = 14
    num_questions: int | None = None
    digits: int = 4
    num_samples: int = 6
    prefill_tokens: int | None = 512
    chat: bool = False
    grader: str = "first_number"
    max_new_tokens: int = 6
    seed: int = 42

    def __post_init__(self):
        if self.num_samples is None:
            raise ValueError("task.num_samples=null: task=needle generates samples without end, give a number")
        super().__post_init__()
        check_least(self, "task", {"length": 1})
        if not 1 <= self.num_keys <= len(NAMES):
            raise ValueError(f"task.num_keys must be in [1, {len(NAMES)}], got {self.num_keys}")
        if self.num_questions is not None and not 1 <= self.num_questions <= self.num_keys:
            raise ValueError(
                f"task.num_questions must be null or in [1, task.num_keys={self.num_keys}], got {self.num_questions}"
            )
        if not 2 <= self.digits <= 12:
            raise ValueError(f"task.digits must be in [2, 12], got {self.digits}")

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Task.samples`.

        Raises:
            ValueError: `length` has no room for the needles, or exceeds `max_positions`.
        """
        self.require_positions("length", max_positions)
        for index in range(self.num_samples):
            yield self._sample(random.Random(f"needle:{self.seed}:{index}"), index, tokenizer, max_positions)

    def _sample(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Sample:
        names = rng.sample(NAMES, self.num_keys)
        codes = rng.sample(range(10 ** (self.digits - 1), 10**self.digits), self.num_keys)
        needles = [_NEEDLE.format(name=name, value=code) for name, code in zip(names, codes)]
        free = (
            self.length - len(encode(tokenizer, _PROMPT)) - sum(len(encode(tokenizer, " " + text)) for text in needles)
        )
        if free < 0:
            raise ValueError(f"task.length={self.length} is {-free} tokens too short for task.num_keys={self.num_keys}")
        text = prose(rng, tokenizer, free)
        # Later needles first, so that the places of the earlier ones stay what they are.
        for needle, depth in reversed(list(zip(needles, self._depths(index)))):
            text.insert(round(depth * len(text)), needle)
        asks, parts = [], self.num_questions or (self.num_keys + 1) // 2
        for part in range(parts):
            # One out of each of equal parts of the needles, which stand in order of depth.
            chosen = rng.randrange(self.num_keys * part // parts, self.num_keys * (part + 1) // parts)
            place = text.index(needles[chosen]) / len(text)
            asks.append(Ask(_CUE.format(name=names[chosen]), (str(codes[chosen]),), {"depth": round(place, 4)}))
        name = f"needle-{index:04d}"
        return build_sample(self, tokenizer, max_positions, id=name, prompt=_PROMPT + " ".join(text), asks=asks)

    def _depths(self, index: int) -> list[float]:
        """Ascending depths in [0, 1), one in each of `num_keys` equal parts; over the samples they fill the parts evenly."""
        # Multiples of the golden ratio modulo 1 stay evenly spread however many are taken.
        within = (0.5 + index * _GOLDEN) % 1
        return [(key + within) / self.num_keys for key in range(self.num_keys)]
