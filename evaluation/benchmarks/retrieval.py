"""What retrieval costs: a decoded token, an index, and the update of a community, each next to what it must beat."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvstitch.allocators.retrieval import CommunityRetrieval
from kvstitch.evaluation.benchmarks.retrieval_parts import (
    DTYPES,
    MadeUpCommunities,
    PressedDecoder,
    StockDecoder,
    bandwidth,
    check_dtypes,
)
from kvstitch.evaluation.benchmarks.retrieval_prefill import PrefillBenchmark
from kvstitch.evaluation.benchmarks.timing import Contestant, interleaved_seconds
from kvstitch.evaluation.options import check_counts, check_least, check_types
from kvstitch.kernels.community_update.workload import CommunityUpdateWorkload
from kvstitch.presses.retrieval import RetrievalPress


@dataclass(frozen=True)
class DecodeBenchmark:
    """Milliseconds per decoded token, batch 1, with `contexts` tokens in the cache.

    Model and cache hold random numbers, and communities random members of realistic sizes: what a step costs does not
    depend on them, and a prompt of 32,768 tokens need not be read. Contestants take turns.

    - stock: transformers' DynamicCache and its own attention, as users have it.
    - dense: our cache, which grows without a concatenation per step, query heads folded into rows.
    - retrieval: `budget` slots a kv head, by communities.
    - rest: the model over one token, so everything but attention.
    - floor: rest, and what retrieval reads at the bandwidth that is measured here; dense_floor: rest, and all keys and
      values.
    - index_share: what stays beside keys and values, over the bytes of those in use.

    Args:
        allocator: whose way of reading and growing is timed.
        contexts: tokens in the cache.
        dtypes: "float32", "bfloat16".
        budget: slots per kv head and step.
        tokens_per_region: mean size of the communities.
        rounds: repeats, of which the median is taken.
        steps: tokens decoded in each repeat.
        num_layers, num_query_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: those of SmolLM2-135M.
    """

    allocator: CommunityRetrieval = field(default_factory=CommunityRetrieval.recommended)
    contexts: Sequence[int] = (8192, 32768)
    dtypes: Sequence[str] = tuple(DTYPES)
    budget: int = 1024
    tokens_per_region: int = 9
    rounds: int = 9
    steps: int = 4
    num_layers: int = 30
    num_query_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152

    def __post_init__(self):
        check_types(self, "bench.decode")
        counts = (
            "budget",
            "tokens_per_region",
            "rounds",
            "steps",
            "num_layers",
            "num_query_heads",
            "num_kv_heads",
            "head_dim",
        )
        check_least(self, "bench.decode", dict.fromkeys((*counts, "intermediate_size", "vocab_size"), 1))
        check_counts("bench.decode.contexts", self.contexts)
        check_dtypes(self.dtypes)
        if min(self.contexts) <= self.budget:
            raise ValueError(f"contexts must be longer than budget={self.budget}, got {min(self.contexts)}")

    def run(self) -> list[dict[str, Any]]:
        """One row per dtype and context."""
        rows = []
        for dtype in self.dtypes:
            model = self._model().to(DTYPES[dtype])
            rows += [self._row(model, dtype, context) for context in self.contexts]
        return rows

    def _row(self, model: PreTrainedModel, dtype: str, context: int) -> dict[str, Any]:
        keys, values = self._storage(context, DTYPES[dtype])
        communities = MadeUpCommunities(self.allocator, self.tokens_per_region)
        contestants = {
            "stock": StockDecoder(model, keys, values, self.steps),
            "dense": self._pressed(model, keys, values, RetrievalPress(communities, budget=1.0)),
            "retrieval": self._pressed(model, keys, values, RetrievalPress(communities, self.budget)),
            "rest": StockDecoder(model, keys[..., :1, :], values[..., :1, :], self.steps),
        }
        del keys, values
        seconds = interleaved_seconds({name: each.timed for name, each in contestants.items()}, self.rounds)
        ms = {name: timing["median_sec"] * 1e3 / self.steps for name, timing in seconds.items()}
        read, speed = contestants["retrieval"].bytes_read(), bandwidth()
        everything = 2 * self.num_layers * self.num_kv_heads * context * self.head_dim * DTYPES[dtype].itemsize
        floor, dense_floor = (ms["rest"] + count / speed * 1e3 for count in (read, everything))
        row: dict[str, Any] = {"kind": "decode", "dtype": dtype, "context": context, "budget": self.budget}
        row |= {f"{name}_ms": round(value, 2) for name, value in ms.items()}
        row |= {
            "floor_ms": round(floor, 2),
            "dense_floor_ms": round(dense_floor, 2),
            "read_mb": round(read / 1e6, 1),
            "bandwidth_gb_per_sec": round(speed / 1e9, 1),
        }
        row |= {f"{name}_to_retrieval": round(ms[name] / ms["retrieval"], 2) for name in ("stock", "dense")}
        row["retrieval_to_floor"] = round(ms["retrieval"] / floor, 2)
        row["dense_to_floor"] = round(ms["dense"] / dense_floor, 2)
        row["index_share"] = round(contestants["retrieval"].index_share(), 4)
        return row

    def _pressed(self, model: PreTrainedModel, keys: Tensor, values: Tensor, press: RetrievalPress) -> PressedDecoder:
        return PressedDecoder(model, keys, values, self.steps, press)

    def _storage(self, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_layers, 1, self.num_kv_heads, context, self.head_dim)
        return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)

    def _model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.num_query_heads * self.head_dim,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_query_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=2 * max(self.contexts),
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config).eval()


@dataclass(frozen=True)
class UpdateBenchmark:
    """Microseconds of one incremental update of communities (the paper's rule), at several lengths of the cache.

    The floor is what the update must read and write at the bandwidth that is measured here: far below what a dozen small
    operators take to start, which the distance to it says.

    Args:
        lengths: slots.
        rounds: repeats, of which the median is taken.
        repeats: updates in each.
    """

    lengths: Sequence[int] = (4096, 65536)
    rounds: int = 15
    repeats: int = 50

    def __post_init__(self):
        check_types(self, "bench.update")
        check_least(self, "bench.update", {"rounds": 1, "repeats": 1})
        check_counts("bench.update.lengths", self.lengths)

    def run(self) -> list[dict[str, Any]]:
        """One row."""
        workloads = {str(length): _update_workload(length) for length in self.lengths}
        contestants = {length: self._contestant(workload) for length, workload in workloads.items()}
        seconds = interleaved_seconds(contestants, self.rounds)
        us = {length: timing["median_sec"] * 1e6 / self.repeats for length, timing in seconds.items()}
        row: dict[str, Any] = {"kind": "update"} | {f"us_at_{length}": round(value, 1) for length, value in us.items()}
        first, last = us[str(self.lengths[0])], us[str(self.lengths[-1])]
        floor = workloads[str(self.lengths[0])].floor_bytes() / bandwidth() * 1e6
        row |= {"floor_us": round(floor, 3)} | {f"at_{length}_to_floor": round(us[length] / floor, 1) for length in us}
        return [row | {"last_to_first": round(last / first, 3)}]

    def _contestant(self, workload: CommunityUpdateWorkload) -> Contestant:
        def update(inputs) -> None:
            for _ in range(self.repeats):
                workload.run(inputs, impl="reference")

        return Contestant(update, lambda: workload.inputs("cpu"))


def _update_workload(length: int) -> CommunityUpdateWorkload:
    # One layer of SmolLM2-135M.
    return CommunityUpdateWorkload(batch=1, heads=3, length=length, head_dim=64, capacity=1024)


@dataclass(frozen=True)
class RetrievalBenchmark:
    """All of it.

    Args:
        threads: torch threads.
        decode, update, prefill: the parts; None leaves one out.
    """

    threads: int = 2
    decode: DecodeBenchmark | None = field(default_factory=DecodeBenchmark)
    update: UpdateBenchmark | None = field(default_factory=UpdateBenchmark)
    prefill: PrefillBenchmark | None = field(default_factory=PrefillBenchmark)

    def __post_init__(self):
        check_types(self, "bench")
        check_least(self, "bench", {"threads": 1})

    def run(self) -> list[dict[str, Any]]:
        """The rows of all parts."""
        torch.set_num_threads(self.threads)
        parts = (self.decode, self.update, self.prefill)
        return [row for part in parts if part is not None for row in part.run()]
