"""kvpress's presses as rows of our tables: the context compressed once, by their code, then asked; next to the dense model."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from kvstitch.evaluation.answers import answer_metrics, graded
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.pipeline import refuse_decoding, theirs_at
from kvstitch.evaluation.results import SampleResult, make_record
from kvstitch.evaluation.streams import Stream, stored_bytes, stored_slots
from kvstitch.evaluation.tasks.base import Sample, Task
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
        refuse_decoding(self.build(2))

    def build(self, context_tokens: int) -> Any:
        """The press for a context of so many tokens.

        Raises:
            ImportError: kvpress is not installed.
            ValueError: it has no such press.
        """
        try:
            import kvpress
        except ImportError as error:
            raise ImportError(f"press=kvpress needs kvpress: pip install -e '.[kvpress]' ({error})") from error
        known = [name for name in dir(kvpress) if name.endswith("Press") and name != "BasePress"]
        if self.name not in known:
            near = difflib.get_close_matches(str(self.name), known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"press.name={self.name!r} is no press of kvpress {version('kvpress')}{hint}")
        seen = torch.tensor([context_tokens])
        keep = min(int(self.budget.slots(seen, 1, least=1)), context_tokens)
        # kvpress keeps int(tokens * (1 - ratio)): half a slot more than wanted is safe from rounding.
        ratio = 0.0 if keep == context_tokens else 1 - (keep + 0.5) / context_tokens
        return getattr(kvpress, self.name)(compression_ratio=ratio, **self.options)


def kvpress_sample(loaded: LoadedModel, baseline: KVPressBaseline, task: Task, sample: Sample) -> SampleResult:
    """Prompt and trace read at once and compressed, then every question asked of a copy; greedily.

    There are no events while decoding, and nothing to compare token by token; `events` is 1 if the budget bound.
    """
    context = [*sample.prompt_ids, *sample.trace_ids]
    stop_ids = stop_token_ids(loaded)
    with torch.no_grad():
        pressed, dense = Stream(loaded.model), Stream(loaded.model)
        dense.prefill(context)
        with baseline.build(len(context))(loaded.model):
            pressed.prefill(context)
        answers = []
        for question in sample.questions:
            fed = list(question.cue_ids)
            # With nothing to feed the first token of the answer is what the context ended on.
            wrote = theirs_at(loaded, pressed, len(context), fed, question.max_new_tokens)
            answer: dict[str, Any] = {"gold": list(question.gold), "meta": dict(question.meta)}
            answer["pressed"] = graded(task, question, loaded.tokenizer, wrote)
            with dense.branch(None) as branch:
                if fed:
                    branch.feed(fed)
                wrote = branch.greedy(question.max_new_tokens, stop_ids)
            answer["dense"] = graded(task, question, loaded.tokenizer, wrote)
            answers.append(answer)
    metrics: dict[str, float | None] = {"events": float(max(stored_slots(pressed.cache)) < len(context))}
    for prefix, stream in (("", pressed), ("dense_", dense)):
        slots = stored_slots(stream.cache)
        metrics |= {f"{prefix}mean_slots": sum(slots) / len(slots), f"{prefix}peak_slots": max(slots)}
        metrics |= {f"{prefix}kv_bytes": stored_bytes(stream.cache), f"{prefix}prefill_seconds": stream.seconds}
    return SampleResult(make_record(sample, metrics | answer_metrics(answers), answers))
