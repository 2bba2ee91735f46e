"""kvpress's presses as rows of our tables: the context compressed once, by their code, then asked; next to the dense model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from kvstitch.evaluation.answers import answer_metrics, graded
from kvstitch.evaluation.baseline import DenseBaselines
from kvstitch.evaluation.dense_side import LiveDense, RecordedDense, dense_beside
from kvstitch.evaluation.models import LoadedModel
from kvstitch.evaluation.pipeline import refuse_decoding, theirs_at
from kvstitch.evaluation.results import SampleResult, make_record
from kvstitch.evaluation.streams import Stream, stored_bytes, stored_slots
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.kernels.common.spelling import did_you_mean
from kvstitch.presses import Budget


@dataclass(frozen=True)
class KVPressBaseline:
    """A press of kvpress that compresses the context when it has been read.

    Args:
        name: its class, e.g. "SnapKVPress".
        budget: tokens per kv head or a kept fraction; turned into the `compression_ratio` that keeps exactly so many.
        options: further arguments of the class.
    """

    name: str
    budget: Budget | int | float | str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "budget", Budget.of(self.budget))
        if self.budget.bytes is not None:
            raise ValueError("`budget` of a kvpress press must be tokens or a kept fraction, got bytes")
        if not isinstance(self.options, Mapping):
            raise TypeError(f"press.options must map arguments of the press to values, got {self.options!r}")
        refuse_decoding(self.build(2))

    def build(self, context_tokens: int) -> Any:
        """The press for a context of so many tokens.

        Raises:
            ImportError: kvpress is not installed.
            ValueError: it has no such press, or one that takes other arguments.
        """
        try:
            import kvpress
        except ImportError as error:
            raise ImportError(f"press=kvpress needs kvpress: pip install -e '.[kvpress]' ({error})") from error
        known = [name for name in dir(kvpress) if name.endswith("Press") and name != "BasePress"]
        if self.name not in known:
            raise ValueError(
                f"press.name={self.name!r} is no press of kvpress {version('kvpress')}; choose one of {', '.join(known)}"
                f"{did_you_mean(self.name, known)}"
            )
        seen = torch.tensor([context_tokens])
        keep = min(int(self.budget.slots(seen, 1, least=1)), context_tokens)
        # kvpress keeps int(tokens * (1 - ratio)): half a slot more than wanted is safe from rounding.
        ratio = 0.0 if keep == context_tokens else 1 - (keep + 0.5) / context_tokens
        try:
            return getattr(kvpress, self.name)(compression_ratio=ratio, **self.options)
        except TypeError as error:
            raise ValueError(f"press.name={self.name} with press.options={dict(self.options)}: {error}") from error


def kvpress_sample(
    loaded: LoadedModel,
    baseline: KVPressBaseline,
    task: Task,
    sample: Sample,
    *,
    baselines: DenseBaselines | None = None,
) -> SampleResult:
    """Prompt and trace read at once and compressed, then every question asked of a copy; greedily.

    There are no events while decoding, and nothing to compare token by token; `events` is 1 if the budget bound. Peaks are
    of the reading, in which each layer holds the whole context before it is compressed; means are of what the questions
    find. `baselines`: as in `replay_sample`.
    """
    context = [*sample.prompt_ids, *sample.trace_ids]
    with torch.no_grad(), dense_beside(loaded, sample, baselines) as dense:
        pressed = Stream(loaded.model)
        with _peaks_noted(pressed), baseline.build(len(context))(loaded.model):
            pressed.prefill(context)
        dense.prefill(context)
        answers = [_ask(loaded, pressed, dense, task, question, len(context)) for question in sample.questions]
    slots = stored_slots(pressed.cache)
    metrics: dict[str, float | None] = {"events": float(max(slots) < len(context)), "prefill_seconds": pressed.seconds}
    metrics |= {"mean_slots": sum(slots) / len(slots), "mean_kv_bytes": stored_bytes(pressed.cache)}
    metrics |= {"peak_slots": pressed.storage.peak_slots, "kv_bytes": pressed.storage.peak_bytes}
    metrics |= answer_metrics(answers) | dense.numbers()
    return SampleResult(make_record(sample, metrics, answers))


def _ask(
    loaded: LoadedModel,
    pressed: Stream,
    dense: LiveDense | RecordedDense,
    task: Task,
    question: Question,
    context_tokens: int,
) -> dict[str, Any]:
    # With nothing to feed the first token of the answer is what the context ended on.
    wrote = theirs_at(loaded, pressed, context_tokens, list(question.cue_ids), question.max_new_tokens)
    answer: dict[str, Any] = {"gold": list(question.gold), "meta": dict(question.meta)}
    answer["pressed"] = graded(task, question, loaded.tokenizer, wrote)
    answer["dense"] = graded(task, question, loaded.tokenizer, dense.answer(question))
    return answer


@contextmanager
def _peaks_noted(stream: Stream) -> Iterator[None]:
    """Looks at the cache after each layer's attention, before a press that is entered later compresses the layer."""
    attention = [
        module for module in stream.model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")
    ]
    handles = [module.register_forward_hook(lambda *_: stream.storage.note_peaks(stream.cache)) for module in attention]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
