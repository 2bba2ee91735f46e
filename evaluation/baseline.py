"""What the dense model gave on a sample, kept so that a table of many presses computes it once.

A baseline is found by what it is made of: the model, the tokens of the sample and the settings that the dense side sees. Logits
are not kept but what enters the output head, a hundredth of them; the same head makes the same logits of it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.tasks.base import Sample

# Enough of each parameter to tell two checkpoints apart, little enough to read in no time.
_FINGERPRINT_VALUES = 64


@dataclass(frozen=True)
class DenseRecord:
    """One sample's dense side.

    Args:
        numbers: its metrics, named as in a sample's record.
        answers: tokens decoded for each question, without what ended them.
        hidden: what entered the output head at each token of the trace; None where no logits are wanted again.
    """

    numbers: Mapping[str, float | None]
    answers: Sequence[Sequence[int]]
    hidden: Float[Tensor, "N C"] | None = None


class DenseBaselines:
    """A folder of dense records, one file a sample, safe with several processes.

    Args:
        folder: made when the first record is written.
        model: whose records are read and written.
        settings: plain values that change what the dense side does: mode, interval, sampling, seed.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, settings: Mapping[str, Any]):
        self._folder = folder
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._common = json.dumps([fingerprint(model), versions, dict(settings)], sort_keys=True)

    def path(self, sample: Sample) -> Path:
        """Where the record of a sample is kept."""
        asked = [[list(question.cue_ids), question.max_new_tokens] for question in sample.questions]
        own = json.dumps([list(sample.prompt_ids), list(sample.trace_ids), asked, sample.id])
        return self._folder / (hashlib.sha256((self._common + own).encode()).hexdigest()[:24] + ".safetensors")

    @contextmanager
    def once(self, sample: Sample) -> Iterator[DenseRecord | None]:
        """The record; None if there is none, and whoever asked first is to make it inside the block.

        Processes that ask meanwhile wait until that block ends. What they find no record of then cannot be kept (see
        `DenseRecord`), and they run it side by side.

        Raises:
            RunError: the disk is full or read-only.
        """
        record = self.read(sample)
        if record is not None:
            yield record
            return
        path = self.path(sample)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            with lock:
                pass
            yield self.read(sample)
            return
        except OSError as error:
            raise _not_kept(path, error) from error
        try:
            # Another process may have made it since.
            yield self.read(sample)
        finally:
            lock.release()

    def read(self, sample: Sample) -> DenseRecord | None:
        """The record, or None if there is none or it cannot be read (it is made anew then)."""
        path = self.path(sample)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                plain = json.loads(file.metadata()["record"])
                hidden = file.get_tensor("hidden") if "hidden" in file.keys() else None
        except (SafetensorError, OSError):
            return None
        return DenseRecord(plain["numbers"], plain["answers"], hidden)

    def write(self, sample: Sample, record: DenseRecord) -> None:
        """Keep a record; it appears whole or not at all.

        Raises:
            RunError: the disk is full or read-only.
        """
        path = self.path(sample)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        plain = {"numbers": dict(record.numbers), "answers": [list(answer) for answer in record.answers]}
        # The format wants a tensor in every file.
        tensors = {"empty": torch.zeros(0)} if record.hidden is None else {"hidden": record.hidden.contiguous()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, scratch, metadata={"record": json.dumps(plain)})
            scratch.replace(path)
        except (OSError, SafetensorError) as error:
            if self._folder.is_dir():
                scratch.unlink(missing_ok=True)
            raise _not_kept(path, error) from error


def _not_kept(path: Path, error: Exception) -> RunError:
    return RunError(f"cannot keep the dense baseline {path}: {error}; reuse_dense=false does without")


def fingerprint(model: PreTrainedModel) -> str:
    """32 hex digits of a model's configuration and of the first values of each of its parameters."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    digest.update(str(model.device.type).encode())
    for name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[:_FINGERPRINT_VALUES].float().cpu().numpy().tobytes()
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}".encode() + first)
    return digest.hexdigest()[:32]
