"""One prompt, read once, for many ways to retrieve from it and many budgets."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import Cache

from kvstitch.allocators.retrieval import LayerFrame, LayerIndex, RetrievingAllocator
from kvstitch.evaluation.answers import Answer, answer_metrics
from kvstitch.evaluation.closed_loop import comparison_metrics, decoded_answer
from kvstitch.evaluation.metrics import compare_tokens
from kvstitch.evaluation.models import LoadedModel
from kvstitch.evaluation.reads import ReadMeter, index_metrics
from kvstitch.evaluation.streams import Stream
from kvstitch.evaluation.tasks.base import Sample, Task
from kvstitch.presses import RetrievalPress, RetrievalRun


class SharedPrompt:
    """A sample whose prompt is read densely, once; what any index would have observed of it is kept.

    Args:
        loaded: model and tokenizer.
        task: grades the answers.
        sample: its trace is decoded token by token under every method, its questions are asked afterwards.
    """

    def __init__(self, loaded: LoadedModel, task: Task, sample: Sample):
        self._loaded, self._task, self._sample = loaded, task, sample
        prompt = Stream(loaded.model)
        with RetrievalPress(_Recording(), budget=1.0)(loaded.model) as run:
            prompt.prefill(sample.prompt_ids)
            layers = run.layers
        self._queries = {index: layer.index.index.query for index, layer in layers.items()}
        for layer in layers.values():
            layer.index = None
        self._prompt = prompt
        dense = _fork(prompt)
        self._expected = dense.feed(sample.trace_ids)
        self._answers = [decoded_answer(loaded, run.press, dense, task, question) for question in sample.questions]

    def measure(
        self, allocator: RetrievingAllocator, budgets: Sequence[int], **options: object
    ) -> Iterator[tuple[int, dict[str, float | None]]]:
        """Budget and metrics, one by one.

        Budgets that share the number of recent tokens share an index: only how it is read differs between them.

        Args:
            allocator: what is read.
            budgets: slots a kv head.
            options: more arguments of the press.
        """
        built: dict[int, Stream] = {}
        for budget in budgets:
            press = RetrievalPress(allocator, budget, **options)
            num_recent = press.plan_for((budget,)).num_recent
            yield budget, self._measure(press, num_recent, built)

    def _measure(self, press: RetrievalPress, num_recent: int, built: dict[int, Stream]) -> dict[str, float | None]:
        meter = ReadMeter()
        stream = _fork(built.get(num_recent, self._prompt))

        def keep_built(event) -> None:
            # The index is there and the first token is not: what another budget can begin with.
            built.setdefault(num_recent, _fork(stream))

        watched = dataclasses.replace(press, on_read=meter, measure_mass=True, on_event=keep_built)
        with watched(self._loaded.model) as run:
            for index, layer in enumerate(stream.cache.layers):
                if index not in self._queries:
                    continue
                layer.owner = press
                if layer.index is None:
                    run.observe_chunk(index, layer, self._queries[index])
                else:
                    layer.index.stale = True
            return self._decode(run, stream, meter)

    def _decode(self, run: RetrievalRun, stream: Stream, meter: ReadMeter) -> dict[str, float | None]:
        sample = self._sample
        got = torch.cat([stream.feed([token]) for token in sample.trace_ids])
        targets = torch.tensor(sample.trace_ids[1:])
        metrics = comparison_metrics(compare_tokens(self._expected[:-1], got[:-1], targets))
        metrics |= meter.metrics(stream.cache)
        names = ("index_bytes", "index_share", "modularity", "resolution", "communities")
        metrics |= {name: value for name, value in index_metrics(run).items() if name in names}
        answers = [
            {"pressed": self._answer(run, stream, question), "dense": dense}
            for question, dense in zip(sample.questions, self._answers)
        ]
        return metrics | answer_metrics(answers)

    def _answer(self, run: RetrievalRun, stream: Stream, question) -> Answer:
        return decoded_answer(self._loaded, run.press, stream, self._task, question)


def _fork(stream: Stream) -> Stream:
    """A stream that goes on from here on a copy of the cache."""
    other = Stream(stream.model)
    other.cache = _copied(stream.cache)
    other._last = stream._last
    return other


def _copied(cache: Cache) -> Cache:
    # Presses and allocators are values; their watchers may hold streams and must not be copied along.
    owners = {id(layer.owner): layer.owner for layer in cache.layers if getattr(layer, "owner", None) is not None}
    return copy.deepcopy(cache, owners)


@dataclasses.dataclass(frozen=True)
class _Recording(RetrievingAllocator):
    """Reads nothing; its indices keep the queries that they are shown."""

    def start(self, frame: LayerFrame) -> LayerIndex:
        return _Recorder()


class _Recorder(LayerIndex):
    query: Tensor | None = None

    def observe(self, query, keys, positions, has_empty):
        self.query = query

    def build(self, view, plan, scores=None):
        raise NotImplementedError("queries are recorded while a prompt is read; nothing is decoded from them")

    select = build

    def map_rows(self, function):
        self.query = function(self.query)

    @property
    def stored_bytes(self) -> int:
        return 0 if self.query is None else self.query.untyped_storage().nbytes()
