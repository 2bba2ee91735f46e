"""A long worked derivation; what was stated or derived in its course is asked for at the end."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_least
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.evaluation.tasks.encoding import Ask, build_sample, encode
from kvstitch.evaluation.tasks.prose import NAMES, prose

_PROMPT = (
    "Problem. Some numbers are given, the others follow from a number that is already known. Work through them one by one, "
    "and at the end recall one of them.\n\nSolution.\n"
)
# The cue ends as the statement begins: asked for in other words, a 135M model finds a fifth of the values less. Leaving
# out "since amber = 47" below costs as much.
_STATEMENT = "Remember that {name} = {value}."
_CUE = "\nAnswer. As stated above: Remember that {name} ="
_VALUES = range(10, 100)
_STEPS_BACK = 3
_MOST_DIFFERENCE = 40
# Values within that difference of the smallest number: while fewer are taken, a derived value can always be found.
_MOST_STEPS = 36


@dataclass(frozen=True)
class _Step:
    text: str
    name: str
    value: int
    source: str | None


@dataclass(frozen=True, kw_only=True)
class Reasoning(Task):
    """Definitions of variables, some given, some derived from one of the three before, with unrelated prose in between.

    Every variable is defined once, no two have the same value, and all are equally likely to be asked for, whether they
    were last mentioned early or late. The value is asked for in the words of its definition: this measures whether the
    cache still holds what the trace said, which a small model can show, rather than whether it can derive.

    Args:
        length: tokens of prompt and trace, reached to within a sentence.
        num_steps: variables; more of them are harder to tell apart.
        given_fraction: chance that a variable is given rather than derived; the first always is.
        num_questions: questions on each derivation, each on another variable, at last mentions spread from early to
            late.
    """

    length: int = 2560
    num_steps: int = 8
    given_fraction: float = 0.6
    num_questions: int = 4
    num_samples: int = 6
    prefill_tokens: int | None = 512
    chat: bool = False
    grader: str = "first_number"
    max_new_tokens: int = 4
    seed: int = 42

    def __post_init__(self):
        if self.num_samples is None:
            raise ValueError("task.num_samples=null: task=reasoning generates samples without end, give a number")
        super().__post_init__()
        check_least(self, "task", {"length": 1})
        if not 2 <= self.num_steps <= _MOST_STEPS:
            raise ValueError(f"task.num_steps must be in [2, {_MOST_STEPS}], got {self.num_steps}")
        if not 0 <= self.given_fraction <= 1:
            raise ValueError(f"task.given_fraction must be in [0, 1], got {self.given_fraction}")
        if not 1 <= self.num_questions <= self.num_steps:
            raise ValueError(
                f"task.num_questions must be in [1, task.num_steps={self.num_steps}], got {self.num_questions}"
            )

    def samples(self, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Iterator[Sample]:
        """See `Task.samples`.

        Raises:
            ValueError: `length` has no room for the steps, or exceeds `max_positions`.
        """
        self.require_positions("length", max_positions)
        for index in range(self.num_samples):
            yield self._sample(random.Random(f"reasoning:{self.seed}:{index}"), index, tokenizer, max_positions)

    def _sample(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> Sample:
        steps = _steps(rng, self.num_steps, self.given_fraction)
        free = self.length - sum(len(encode(tokenizer, text)) for text in (_PROMPT, *(step.text for step in steps)))
        # A paragraph ends in a newline of its own.
        free -= self.num_steps
        if free < 0:
            raise ValueError(
                f"task.length={self.length} is {-free} tokens too short for task.num_steps={self.num_steps}"
            )
        filler = prose(rng, tokenizer, free)
        trace, position, last_mention = "", len(encode(tokenizer, _PROMPT)), {}
        for number, step in enumerate(steps):
            last_mention[step.name] = position
            if step.source is not None:
                last_mention[step.source] = position
            paragraph = " ".join(filler[number :: self.num_steps])
            piece = step.text + (paragraph + "\n" if paragraph else "")
            position += len(encode(tokenizer, piece))
            trace += piece
        asks = [
            Ask(
                _CUE.format(name=step.name),
                (str(step.value),),
                {"depth": round(last_mention[step.name] / position, 4), "derived": step.source is not None},
            )
            for step in _spread(rng, sorted(steps, key=lambda step: last_mention[step.name]), self.num_questions)
        ]
        name = f"reasoning-{index:04d}"
        return build_sample(self, tokenizer, max_positions, id=name, prompt=_PROMPT, trace=trace, asks=asks)


def _steps(rng: random.Random, count: int, given_fraction: float) -> list[_Step]:
    """Definitions in order, no value twice."""
    steps: list[_Step] = []
    for number, name in enumerate(rng.sample(NAMES, count), 1):
        free = sorted(set(_VALUES) - {step.value for step in steps})
        source = rng.choice(steps[-_STEPS_BACK:]) if steps and rng.random() >= given_fraction else None
        if source is not None:
            free = [value for value in free if 2 <= abs(value - source.value) < _MOST_DIFFERENCE]
        value = rng.choice(free)
        statement = _STATEMENT.format(name=name, value=value)
        if source is None:
            text = f"Step {number}. This one is given. {statement}\n"
        else:
            sign, word = ("+", "more") if value > source.value else ("-", "fewer")
            difference = abs(value - source.value)
            text = (
                f"Step {number}. Now take {difference} {word} than {source.name}. Since {source.name} = {source.value}, "
                f"we get {source.value} {sign} {difference} = {value}, so {name} = {value}. {statement}\n"
            )
        steps.append(_Step(text, name, value, source and source.name))
    return steps


def _spread(rng: random.Random, ordered: list[_Step], count: int) -> list[_Step]:
    """One out of each of `count` equal parts of the list."""
    borders = [len(ordered) * part // count for part in range(count + 1)]
    return [rng.choice(ordered[start:end]) for start, end in zip(borders, borders[1:])]
