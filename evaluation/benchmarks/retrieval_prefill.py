"""What an index adds to the reading of a prompt."""

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvstitch.allocators.retrieval import CommunityRetrieval
from kvstitch.evaluation.benchmarks.retrieval_parts import bandwidth, check_dtypes, index_share
from kvstitch.evaluation.benchmarks.timing import Contestant, interleaved_seconds
from kvstitch.evaluation.models import LoadedModel, load_smollm2
from kvstitch.evaluation.options import check_least, check_types
from kvstitch.evaluation.streams import auxiliary_bytes
from kvstitch.evaluation.tasks.prose import prose
from kvstitch.presses.retrieval import RetrievalPress
from kvstitch.presses.retrieval_run import RetrievalRun


@dataclass(frozen=True)
class PrefillBenchmark:
    """Seconds of a prompt read by the embedded model, and what building all indices adds.

    Wall time, and processor time of all threads, which other work on the machine disturbs less. The floor is the dense
    prefill, which is a matter of arithmetic and not of bandwidth, and on top of it what an index needs at least at the
    bandwidth that is measured here: every key and query read once, the index written once.

    Args:
        allocator: whose index is built.
        tokens: length of the prompt.
        dtypes: "float32", "bfloat16"; beside half the bytes of keys and values stands more than half of an index.
        budget: of the press.
        text: a UTF-8 text file; None for prose that we make up.
        rounds: repeats, of which the median is taken.
    """

    allocator: CommunityRetrieval = field(default_factory=CommunityRetrieval.recommended)
    tokens: int = 8064
    dtypes: Sequence[str] = ("float32",)
    budget: int = 1024
    text: str | None = None
    rounds: int = 3

    def __post_init__(self):
        check_types(self, "bench.prefill")
        check_least(self, "bench.prefill", {"tokens": 2, "budget": 1, "rounds": 1})
        check_dtypes(self.dtypes)

    def run(self) -> list[dict[str, Any]]:
        """A row per dtype; what is waited for at the end is `exposed_sec`, the work in the background `background_sec`.

        `observe_sec` is spent on edges alone, `attend_sec` on attention that gives edges on the side.
        """
        return [self._row(load_smollm2(dtype=dtype), dtype) for dtype in self.dtypes]

    def _row(self, loaded: LoadedModel, dtype: str) -> dict[str, Any]:
        ids = self._tokens(loaded)
        runs: list[RetrievalRun] = []
        caches: list[Cache] = []
        processor: dict[str, list[float]] = {"dense": [], "pressed": []}

        @torch.no_grad()
        def read(press: RetrievalPress | None) -> None:
            start = time.process_time()
            with nullcontext() if press is None else press(loaded.model) as run:
                cache = loaded.model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
                loaded.model(ids[:, -1:], past_key_values=cache, use_cache=True)
            processor["dense" if press is None else "pressed"].append(time.process_time() - start)
            if run is not None:
                runs.append(run)
                caches[:] = [cache]

        press = RetrievalPress(self.allocator, self.budget)
        contestants = {"dense": Contestant(lambda _: read(None)), "pressed": Contestant(lambda _: read(press))}
        seconds = {
            name: timing["median_sec"]
            for name, timing in interleaved_seconds(contestants, self.rounds, warm_up=0).items()
        }
        floor = seconds["dense"] + self._bytes_needed(loaded, caches[0]) / bandwidth()
        row: dict[str, Any] = {"kind": "prefill", "dtype": dtype, "tokens": self.tokens}
        row |= {f"{name}_sec": round(value, 2) for name, value in seconds.items()}
        row |= {"floor_sec": round(floor, 2), "pressed_to_floor": round(seconds["pressed"] / floor, 3)}
        row |= _parts(runs)
        row["overhead"] = round(seconds["pressed"] / seconds["dense"] - 1, 3)
        used = {name: statistics.median(samples) for name, samples in processor.items()}
        row |= {f"{name}_processor_sec": round(value, 2) for name, value in used.items()}
        row["processor_overhead"] = round(used["pressed"] / used["dense"] - 1, 3)
        row["index_share"] = round(index_share(caches[0]), 4)
        return row

    def _bytes_needed(self, loaded: LoadedModel, cache: Cache) -> int:
        keys = sum(layer.keys.nbytes for layer in cache.layers)
        config = loaded.model.config
        queries = keys * config.num_attention_heads // config.num_key_value_heads
        return keys + queries + auxiliary_bytes(cache)

    def _tokens(self, loaded: LoadedModel) -> Tensor:
        if self.text is None:
            text = " ".join(prose(random.Random(0), loaded.tokenizer, self.tokens + 100))
        else:
            text = Path(self.text).read_text(encoding="utf-8")
        ids = loaded.tokenizer(text).input_ids[: self.tokens]
        if len(ids) < self.tokens:
            raise ValueError(f"text must have at least {self.tokens} tokens, got {len(ids)} of {self.text}")
        return torch.tensor([ids])


def _parts(runs: list[RetrievalRun]) -> dict[str, float]:
    events = [run.events[0] for run in runs]
    parts = {
        "observe_sec": [event.observe_seconds for event in events],
        "attend_sec": [event.attend_seconds for event in events],
        "index_sec": [event.seconds for event in events],
        "exposed_sec": [event.exposed_seconds for event in events],
        "background_sec": [event.busy_seconds for event in events],
    }
    return {name: round(statistics.median(samples), 2) for name, samples in parts.items()}
