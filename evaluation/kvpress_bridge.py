"""Our presses in kvpress's own pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvstitch.presses import EvictionPress, EvictionRun


@dataclass(frozen=True)
class ForKVPress:
    """An eviction press as kvpress's `KVPressTextGenerationPipeline` takes its own: it compresses the context, once.

    `pipeline(context, questions=[...], press=ForKVPress(press))`. kvpress decodes without a press, with a cache of stock
    layers and positions that it counts itself; so the compressed layers are handed over as stock layers when the context has
    been read. Compaction while decoding is not possible there; use `ContextPipeline` for it.

    Args:
        press: with `compress_prompt=True`.
    """

    press: EvictionPress

    def __post_init__(self):
        if not isinstance(self.press, EvictionPress):
            raise TypeError(f"`press` must be an EvictionPress, got {self.press!r}")
        if not self.press.compress_prompt:
            raise ValueError(
                "kvpress's pipeline compresses the context only: `press` needs compress_prompt=True, got False"
            )

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[EvictionRun]:
        """A press at work while the context is read.

        Raises:
            NotImplementedError: heads that keep different numbers of slots, which stock layers cannot hold.
        """
        with self.press(model) as run:
            yield run
            run.end_prefill()
            cache = run.cache
            compacted = run.layers
        for index, layer in compacted.items():
            if layer.has_empty:
                raise NotImplementedError(
                    "kvpress's pipeline needs the same number of slots in every head; choose another allocator than "
                    "HeadAdaptive(mode='ragged')"
                )
            stock = DynamicLayer()
            # `update` joins what is there with what comes, and owns its memory.
            stock.update(layer.keys.clone(), layer.values.clone())
            cache.layers[index] = stock
