"""The dense model in a replay: run beside the press, or read from the record of an earlier run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvstitch.evaluation.baseline import DenseBaselines, DenseRecord
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.streams import Storage, Stream
from kvstitch.evaluation.tasks.base import Question, Sample


@contextmanager
def dense_beside(
    loaded: LoadedModel,
    sample: Sample,
    baselines: DenseBaselines | None,
    press_off: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator["LiveDense | RecordedDense"]:
    """The dense side of a sample; what an earlier run did not leave is kept when the block ends well.

    Args:
        baselines: where it is read and kept; None runs it every time.
        press_off: makes the context in which no press is at work on the model.

    Raises:
        RunError: the disk is full or read-only.
    """
    with nullcontext() if baselines is None else baselines.once(sample) as known:
        if known is not None:
            yield RecordedDense(loaded.model, known)
            return
        dense = LiveDense(loaded, press_off, keep=baselines is not None)
        yield dense
        made = dense.record()
        if made is not None:
            baselines.write(sample, made)


class LiveDense:
    """The dense model at work, and what of it can be kept.

    Args:
        loaded: model and tokenizer.
        press_off: makes the context in which no press is at work on the model.
        keep: whether what enters the output head is collected for `record`.
    """

    def __init__(self, loaded: LoadedModel, press_off: Callable[[], AbstractContextManager], keep: bool):
        self._stream = Stream(loaded.model)
        self._press_off = press_off
        self._stop_ids = stop_token_ids(loaded)
        self._hidden: list[Tensor] | None = [] if keep else None
        self._answers: list[list[int]] = []
        self._numbers: dict[str, float | None] = {}

    def prefill(self, token_ids: Sequence[int]) -> None:
        with self._press_off():
            self._stream.prefill(token_ids)
        self._numbers["dense_prefill_seconds"] = self._stream.seconds

    def feed(self, token_ids: Sequence[int]) -> Float[Tensor, "N V"]:
        """Logits after each token."""
        model = self._stream.model
        with self._press_off(), _head_input(model) as seen:
            logits = self._stream.feed(token_ids)
        if self._hidden is not None:
            # A model that does more than the head (a soft cap) cannot be read from a record.
            if len(seen) == 1 and torch.equal(head_logits(model, seen[0]), logits):
                self._hidden.append(seen[0].cpu())
            else:
                self._hidden = None
        return logits

    def answer(self, question: Question) -> list[int]:
        """Tokens decoded from a copy of the cache."""
        with self._press_off(), self._stream.branch(None) as branch:
            if question.cue_ids:
                branch.feed(question.cue_ids)
            self._answers.append(branch.greedy(question.max_new_tokens, self._stop_ids))
        return self._answers[-1]

    def speed(self, count: int) -> float | None:
        """Decoded tokens a second at the end; spoils the stream."""
        with self._press_off():
            speed = count / self._stream.time_steps(count) if count else None
        self._numbers["dense_decode_tokens_per_second"] = speed
        return speed

    def numbers(self) -> dict[str, float | None]:
        """Metrics of the dense side so far."""
        return self._measured() | {"dense_reused": 0.0}

    def record(self) -> DenseRecord | None:
        """What an earlier run hands to later ones; None if the logits could not be made of it again."""
        if self._hidden is None:
            return None
        return DenseRecord(self._measured(), self._answers, torch.cat(self._hidden) if self._hidden else None)

    def _measured(self) -> dict[str, float | None]:
        return self._numbers | storage_metrics("dense_", self._stream.storage)


class RecordedDense:
    """The dense side of an earlier run. Its times are that run's.

    Args:
        model: whose output head makes the logits.
        record: of the sample.
    """

    def __init__(self, model: PreTrainedModel, record: DenseRecord):
        self._model = model
        self._record = record
        self._fed = 0
        self._asked = 0

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def feed(self, token_ids: Sequence[int]) -> Float[Tensor, "N V"]:
        """Logits after each token, by the head from what entered it."""
        hidden = self._record.hidden[self._fed : self._fed + len(token_ids)]
        self._fed += len(token_ids)
        return head_logits(self._model, hidden)

    def answer(self, question: Question) -> list[int]:
        """Tokens decoded then."""
        self._asked += 1
        return list(self._record.answers[self._asked - 1])

    def speed(self, count: int) -> float | None:
        return self._record.numbers["dense_decode_tokens_per_second"]

    def numbers(self) -> dict[str, float | None]:
        """Metrics of the dense side; its times are those of the earlier run."""
        return {**self._record.numbers, "dense_reused": 1.0}


@torch.no_grad()
def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "N C"]) -> Float[Tensor, "N V"]:
    """What the output head makes of its input."""
    head = model.get_output_embeddings()
    return head(hidden.to(head.weight.device)[None])[0]


def storage_metrics(prefix: str, storage: Storage | None) -> dict[str, float | None]:
    """Slots and bytes under the names of a sample's record."""
    return {
        f"{prefix}mean_slots": storage and storage.mean_slots,
        f"{prefix}peak_slots": storage and storage.peak_slots,
        f"{prefix}kv_bytes": storage and storage.peak_bytes,
        f"{prefix}mean_kv_bytes": storage and storage.mean_bytes,
        f"{prefix}auxiliary_bytes": storage and storage.peak_auxiliary_bytes,
    }


@contextmanager
def _head_input(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects `[N, C]` of each forward of the output head."""
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    if head is None:
        yield seen
        return
    handle = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()[0]))
    try:
        yield seen
    finally:
        handle.remove()
