"""What one compaction costs: AMS next to global top-k and to kvpress, with the same scorer on the same cache."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvstitch.allocators import EvictingAllocator, GlobalTopK, SegmentQuota
from kvstitch.evaluation.benchmarks.event_memory import UNMEASURED, peak_extra_bytes
from kvstitch.evaluation.benchmarks.timing import Contestant, interleaved_seconds
from kvstitch.evaluation.options import check_least, check_types
from kvstitch.presses import EvictionPress
from kvstitch.scorers import RKV, TOVA, ExpectedAttention, KeyDiff, Scorer, SnapKV, TriAttention

SCORERS: dict[str, Scorer] = {
    "tova": TOVA(),
    "snapkv": SnapKV(),
    "expected_attention": ExpectedAttention(),
    "keydiff": KeyDiff(),
    "rkv": RKV(),
    "triattention": TriAttention(),
}
KVPRESS_NAMES = {
    "tova": "TOVAPress",
    "snapkv": "SnapKVPress",
    "expected_attention": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
}
# The widest window of queries that a scorer looks at: so many tokens really go through the model.
_MEMORY_QUERIES = 256


@dataclass(frozen=True)
class EventBenchmark:
    """One event over all layers: score, select, gather; `slots` stored before and `keep` afterwards.

    The model has random weights: the arithmetic of an event does not depend on what the numbers are, and the benchmark
    needs no download.

    Args:
        slots: stored slots per kv head before the event.
        keep: budget.
        scorers: names out of tova, snapkv, expected_attention, keydiff, rkv, triattention.
        num_layers: decoder layers; defaults are those of SmolLM2-135M.
        num_query_heads: Q.
        num_kv_heads: H.
        head_dim: D.
        rounds: repeats, of which the median is taken.
        threads: torch threads.
        memory_slots: length at which the memory that an event needs beside the cache is measured; None leaves it out.
        memory_scorers: whose events those are.
        memory_layers: layers of those events. They are scored one after another, so a few show what many need: R-KV
            takes seconds a layer at 16,384 slots.
    """

    slots: int = 768
    keep: int = 256
    scorers: Sequence[str] = field(default=tuple(SCORERS))
    num_layers: int = 30
    num_query_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    rounds: int = 15
    threads: int = 2
    memory_slots: int | None = 16384
    memory_scorers: Sequence[str] = ("rkv",)
    memory_layers: int = 2

    def __post_init__(self):
        check_types(self, "bench")
        counts = (
            "slots",
            "num_layers",
            "num_query_heads",
            "num_kv_heads",
            "head_dim",
            "rounds",
            "threads",
            "memory_layers",
        )
        check_least(self, "bench", dict.fromkeys(counts, 1))
        unknown = [name for name in (*self.scorers, *self.memory_scorers) if name not in SCORERS]
        if unknown:
            raise ValueError(f"scorers must be among {', '.join(SCORERS)}, got {', '.join(unknown)}")
        if not 0 < self.keep < self.slots:
            raise ValueError(f"keep must lie between 0 and slots={self.slots}, got {self.keep}")
        if self.memory_slots is not None and self.memory_slots <= self.keep:
            raise ValueError(f"memory_slots must be above keep={self.keep}, got {self.memory_slots}")

    def run(self) -> list[dict[str, Any]]:
        """One row per scorer: milliseconds of each kind of event and the ratios between them; then the rows of memory."""
        torch.set_num_threads(self.threads)
        model = self._model(self.num_layers)
        rows = [{"kind": "time"} | self._row(model, name) for name in self.scorers]
        if self.memory_slots is not None:
            rows += [self._memory_row(name) for name in self.memory_scorers]
        return rows

    def _memory_row(self, name: str) -> dict[str, Any]:
        """Resident memory that one event over `memory_layers` adds at its peak, beside the cache."""
        model = self._model(self.memory_layers)
        own_tokens = min(_MEMORY_QUERIES, self.memory_slots // 2)
        cache = self._random_cache(model, self.memory_slots - own_tokens)
        run = EvictionPress(SCORERS[name], SegmentQuota.recommended(), self.keep, interval=10**6)(model)
        with run, torch.no_grad():
            model(self._tokens(own_tokens), past_key_values=cache, logits_to_keep=1)
            extra = peak_extra_bytes(run.compact)
        row = {"kind": "memory", "scorer": name, "slots": self.memory_slots, "keep": self.keep}
        row |= {"layers": self.memory_layers, "extra_mib": None if extra is None else round(extra / 2**20, 1)}
        return row if extra is not None else row | {"note": UNMEASURED}

    def _random_cache(self, model: PreTrainedModel, slots: int) -> DynamicCache:
        """As a prompt would leave it, without the prompt's cost, which grows with the square of its length."""
        cache = DynamicCache(config=model.config)
        generator = torch.Generator().manual_seed(0)
        for layer in range(self.memory_layers):
            keys, values = torch.randn(2, 1, self.num_kv_heads, slots, self.head_dim, generator=generator)
            cache.update(keys, values, layer)
        return cache

    def _row(self, model: PreTrainedModel, name: str) -> dict[str, Any]:
        allocators: dict[str, EvictingAllocator] = {
            "topk": GlobalTopK(),
            "ams": SegmentQuota.recommended(),
            "ams_paper": SegmentQuota.paper(),
        }
        contestants = {kind: self._event(model, SCORERS[name], allocator) for kind, allocator in allocators.items()}
        if name in KVPRESS_NAMES:
            contestants["kvpress"] = self._kvpress_event(model, KVPRESS_NAMES[name])
        seconds = interleaved_seconds(contestants, self.rounds)
        row: dict[str, Any] = {"scorer": name, "slots": self.slots, "keep": self.keep, "layers": self.num_layers}
        row |= {f"{kind}_ms": round(timing["median_sec"] * 1e3, 2) for kind, timing in seconds.items()}
        topk = seconds["topk"]["median_sec"]
        row["ams_to_topk"] = round(seconds["ams"]["median_sec"] / topk, 2)
        if "kvpress" in seconds:
            row["ams_to_kvpress"] = round(seconds["ams"]["median_sec"] / seconds["kvpress"]["median_sec"], 2)
        return row

    def _event(self, model: PreTrainedModel, scorer: Scorer, allocator: EvictingAllocator) -> Contestant:
        """The second event of a request: credit exists, and heads hold different tokens."""
        press = EvictionPress(scorer, allocator, self.keep, interval=10**6, record_events=False)
        run = press(model)
        ids = self._tokens(self.slots)
        with run, torch.no_grad():
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            run.compact()
            model(ids[:, : self.slots - self.keep], past_key_values=cache, logits_to_keep=1)
        template = cache.layers

        def prepare() -> None:
            cache.layers = copy.deepcopy(template, {id(press): press})

        return Contestant(lambda _: run.compact(), prepare)

    def _kvpress_event(self, model: PreTrainedModel, name: str) -> Contestant:
        """What kvpress's DecodingPress does at an event, in every layer; its hook around it is left out."""
        import kvpress

        press = kvpress.DecodingPress(getattr(kvpress, name)(), self.slots - self.keep, target_size=self.keep)
        modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
        for module in modules:
            # As kvpress's own context does for scorers that rotate.
            module.rotary_emb = model.model.rotary_emb
        generator = torch.Generator().manual_seed(0)
        hidden_size = model.config.hidden_size
        layers = []
        for _ in modules:
            shape = (1, self.num_kv_heads, self.slots, self.head_dim)
            keys, values = torch.randn(2, *shape, generator=generator)
            layers.append((torch.randn(1, 256, hidden_size, generator=generator), keys, values))
        positions = torch.arange(self.slots - 256, self.slots)[None]
        embeddings = model.model.rotary_emb(layers[0][0], positions)

        def compress(_) -> None:
            with torch.no_grad():
                for module, (hidden, keys, values) in zip(modules, layers):
                    press.compress(module, hidden, keys, values, None, {"position_embeddings": embeddings})

        return Contestant(compress)

    def _model(self, num_layers: int) -> PreTrainedModel:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.num_query_heads * self.head_dim,
            intermediate_size=256,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_query_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4 * max(self.slots, self.memory_slots or 0),
        )
        return LlamaForCausalLM(config).eval()

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(1))
