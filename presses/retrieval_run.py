"""A retrieval press at work: indices built when the prompt is complete, and read at every step."""

import time
import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from kvstitch.allocators.retrieval import DecodeStep, LayerFrame, ReadPlan, Reads
from kvstitch.allocators.retrieval.background import Background
from kvstitch.presses.cache import Request, StitchLayer
from kvstitch.presses.retrieval_attention import attend, attention_mass
from kvstitch.presses.retrieval_events import IndexEvent, LayerIndexed, ReadEvent
from kvstitch.presses.retrieval_state import IndexedLayer
from kvstitch.presses.run import Run
from kvstitch.views import Needs

# Indices are prepared so many tokens before the budget is full: time for the background, and few prompts end there.
_AHEAD_TOKENS = 32


class RetrievalRun(Run):
    """A `RetrievalPress` at work; `events` tells what each index is like.

    Args:
        press: the `RetrievalPress`.
        model: its model.
    """

    def __init__(self, press, model: PreTrainedModel):
        super().__init__(press, model, Needs() if press.scorer is None else press.scorer.needs, growth_tokens=256)
        self.events: list[IndexEvent] = []
        self.num_events = 0
        self.num_sparse_steps = 0
        self._background = Background(press.workers)
        self._observe_seconds = self._observe_total = self._attend_seconds = 0.0
        self._said_dense = False
        self._is_causal = True
        self._indexed = [index for index in self._facts.attention if index >= press.dense_layers]
        if not self._indexed:
            raise ValueError(
                f"`dense_layers` must leave a full-attention layer to retrieve from: those are "
                f"{sorted(self._facts.attention)}, got {press.dense_layers}"
            )
        if press.budget.bytes is not None and self._slot_bytes is not None:
            # A budget in bytes that buys too little fails here and not at the first decoded token.
            press.plan(torch.zeros(1, dtype=torch.int64), self._slot_bytes)

    @property
    def bound(self) -> bool:
        """Whether any step read less than everything."""
        return self.num_sparse_steps > 0

    @property
    def event_seconds(self) -> float:
        """Wall time of everything that was done for the indices alone, beside and after the prompt's forward.

        Attention that gives edges on the side is not counted: nobody can tell what of it is for them.
        """
        return self._observe_total + sum(event.seconds for event in self.events)

    @property
    def index_bytes(self) -> int:
        """Bytes held beside keys and values: indices, edges that are kept, and the positions of the slots."""
        layers = [self._cache.layers[index] for index in self._indexed] if self._cache is not None else []
        states = [layer.index for layer in layers if layer.index is not None]
        positions = sum(layer.stored_positions.untyped_storage().nbytes() for layer in layers if layer.is_initialized)
        return positions + sum(state.index.stored_bytes for state in states)

    @property
    def index_share(self) -> float | None:
        """`index_bytes` over the bytes of the indexed layers' keys and values in use, room for growth left out; None for an empty cache."""
        layers = [self._cache.layers[index] for index in self._indexed] if self._cache is not None else []
        used = sum(part.nbytes for layer in layers if layer.is_initialized for part in (layer.keys, layer.values))
        return self.index_bytes / used if used else None

    @property
    def _slot_bytes(self) -> int | None:
        """Bytes of a slot per kv head over the indexed layers, if the configuration tells."""
        sizes = self._facts.slot_bytes
        return None if sizes is None else sum(sizes[index] for index in self._indexed)

    def _install(self) -> None:
        super()._install()
        self._background.open()

    def _uninstall(self) -> None:
        super()._uninstall()
        self._background.close()

    def _take_over(self, layers: list[StitchLayer]) -> None:
        if any(layer.was_compacted for layer in layers):
            raise NotImplementedError(
                "retrieval needs a complete cache, and slots of this one were evicted by another press"
            )
        super()._take_over(layers)

    # -- while the prompt is read -----------------------------------------------------------------------------------

    @torch.no_grad()
    def observe_chunk(self, index: int, layer: StitchLayer, query: Tensor) -> Tensor | None:
        if index < self.press.dense_layers:
            return None
        start = time.perf_counter()
        state = self._state(index, layer)
        out = None
        with self._background.holding(not self._is_nearly_full(layer.length)):
            if self._may_attend_while_observing(query, layer):
                out = state.index.attend(query, layer.keys, layer.values, layer.positions)
            if out is None:
                state.index.observe(query, layer.keys, layer.positions, layer.has_empty)
        state.length, state.stale = layer.length, True
        seconds = time.perf_counter() - start
        if out is not None:
            self._attend_seconds += seconds
            return out
        self._observe_seconds += seconds
        self._observe_total += seconds
        return None

    def _may_attend_while_observing(self, query: Tensor, layer: StitchLayer) -> bool:
        """Whether edges and output may be found at once: where attention is plainly causal, and, on a CPU, where it is
        not a function of the user's own."""
        plain = self._is_causal and not layer.has_empty and layer.values.shape[-1] == query.shape[-1]
        return plain and (query.is_cuda or self._user_attention == "sdpa")

    def _mask(self, *args, **kwargs):
        if kwargs.get("local_size") is None:
            self._is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        return super()._mask(*args, **kwargs)

    def _state(self, index: int, layer: StitchLayer) -> IndexedLayer:
        if layer.index is None:
            module = self._facts.attention[index]
            frame = LayerFrame(
                layer_idx=index,
                group=module.config.num_attention_heads // layer.keys.shape[1],
                num_sinks=self.press.num_sinks,
                scaling=module.scaling,
                background=self._background,
                softcap=getattr(module, "attn_logit_softcapping", None),
                sink_logits=getattr(module, "sinks", None),
            )
            layer.index = IndexedLayer(self.press.allocator.start(frame))
        layer.index.index.work_in(self._background)
        return layer.index

    def _is_nearly_full(self, length: int) -> bool:
        """Whether an index is needed now or soon, with so many slots; where a budget is no number of slots, it may be."""
        budget = self.press.budget
        if budget.tokens is None:
            return budget.fraction != 1
        return max(length, self._prompt_until) + _AHEAD_TOKENS >= budget.tokens

    # -- what is refused before it is read ----------------------------------------------------------------------------

    def _announce(self, request: Request, tokens: Tensor, mask: Tensor | None, position_ids: Tensor) -> None:
        super()._announce(request, tokens, mask, position_ids)
        if tokens.shape[1] == 1 or self.seen_tokens + tokens.shape[1] != self._prompt_until:
            # Only `generate` tells where a prompt ends; of any other it is known when the first single token comes.
            return
        if self.press.budget.bytes is not None and self._slot_bytes is None:
            return
        row_tokens = (request.positions >= 0).sum(dim=-1).cpu()
        if self.seen_tokens:
            row_tokens = row_tokens + self._layers()[0].row_tokens().cpu()
        self._check_prompt(row_tokens, self.press.plan(row_tokens, self._slot_bytes or 0))

    def _check_prompt(self, row_tokens: Tensor, plan: ReadPlan) -> None:
        """Tells the allocator how long the longest row of a prompt is, if an index will be built; `row_tokens` is `[B]`.

        Shorter rows of a batch have fewer edges than were asked for; that is no reason to refuse their neighbours.
        """
        longest = int(row_tokens.max())
        if self.press.budget.fraction != 1 and longest >= plan.width:
            self.press.allocator.check_prompt(longest, self.press.num_sinks)

    # -- when the prompt is complete ----------------------------------------------------------------------------------

    def before_tokens(self, request: Request, count: int) -> None:
        if count > 1 or request.in_prefill:
            return
        layers = {index: self._cache.layers[index] for index in self._indexed}
        if self._is_nearly_full(max(layer.length for layer in layers.values())):
            self._background.release()
        due = {}
        for index, layer in layers.items():
            state = self._state(index, layer)
            if state.stale or state.length != layer.length or state.index.due(layer.length):
                due[index] = layer
        if due:
            self._build(due)
        for layer in layers.values():
            layer.index.length = layer.length + 1

    @torch.no_grad()
    def _build(self, layers: dict[int, StitchLayer]) -> None:
        plan = self._plan(layers)
        length = max(layer.length for layer in layers.values())
        if self.press.budget.fraction == 1 or length < plan.width:
            self._stay_dense(length, plan)
            return
        if self.seen_tokens == self._request().counted_from:
            self._check_prompt(next(iter(layers.values())).row_tokens(), plan)
        for layer in layers.values():
            layer.index.index.prepare()
        busy, exposed = self._background.busy_seconds, self._background.exposed_seconds
        indexed = tuple(self._build_layer(index, layer, plan) for index, layer in layers.items())
        event = IndexEvent(
            index=self.num_events,
            seen_tokens=self.seen_tokens,
            budgets=plan.budgets,
            num_recent=plan.num_recent,
            observe_seconds=self._observe_seconds,
            busy_seconds=self._background.busy_seconds - busy,
            exposed_seconds=self._background.exposed_seconds - exposed,
            layers=indexed,
            attend_seconds=self._attend_seconds,
        )
        self._observe_seconds = self._attend_seconds = 0.0
        self.num_events += 1
        if self.press.record_events:
            self.events.append(event)
        if self.press.on_event is not None:
            self.press.on_event(event)

    def _build_layer(self, index: int, layer: StitchLayer, plan: ReadPlan) -> LayerIndexed:
        start = time.perf_counter()
        state = layer.index
        view = layer.view(self._facts.attention[index].scaling, self._facts.rotary, index, self._facts.num_layers)
        scores = None if self.press.scorer is None else self.press.scorer.score(view)
        state.reorder(layer, state.index.build(view, plan, scores))
        state.built, state.stale = True, False
        seconds = time.perf_counter() - start
        return LayerIndexed(index, state.index.describe(), state.index.stored_bytes, seconds)

    def _plan(self, layers: dict[int, StitchLayer]) -> ReadPlan:
        layer = next(iter(layers.values()))
        sizes = [
            x.keys.shape[1] * (x.keys.shape[3] + x.values.shape[3]) * x.keys.element_size() for x in layers.values()
        ]
        return self.press.plan(layer.row_tokens(), sum(sizes))

    def _stay_dense(self, length: int, plan: ReadPlan) -> None:
        if not self._said_dense:
            self._said_dense = True
            warnings.warn(
                f"kvstitch: {length} tokens fit the budget of {plan.width} slots, so every step reads all of them; an index "
                "is built when they no longer do",
                stacklevel=2,
            )

    # -- while the model decodes --------------------------------------------------------------------------------------

    def decode(self, index: int, layer: StitchLayer, query: Tensor, scaling: float, extras: dict) -> Tensor:
        state = layer.index
        if state is None or not state.built:
            return super().decode(index, layer, query, scaling, extras)
        step = DecodeStep(query, layer.keys, layer.values, layer.stored_positions, layer.request.has_padding)
        reads = state.index.select(step)
        top_k = state.index.update_top_k
        result = attend(query, layer.keys, layer.values, reads, scaling, top_k, self.press.num_sinks, **extras)
        if top_k:
            state.index.update(step, result.weights, result.slots)
        if index == self._indexed[0]:
            self.num_sparse_steps += 1
        if self.press.on_read is not None:
            mass = None
            if self.press.measure_mass:
                mass = attention_mass(query, layer.keys, layer.bias, reads.slots, scaling, **extras)
            self.press.on_read(_read_event(index, layer, reads, mass))
        return result.output


def _read_event(index: int, layer: StitchLayer, reads: Reads, mass: Tensor | None) -> ReadEvent:
    held = layer.positions
    heads = held.shape[1]
    by_selection = held.repeat_interleave(reads.slots.shape[1] // heads, dim=1)
    positions = by_selection.gather(-1, reads.slots.clamp(min=0)).masked_fill(reads.slots < 0, -1)
    index_reads = reads.index_rows, reads.index_bytes
    return ReadEvent(index, layer.seen_tokens, heads, positions, *index_reads, reads.key_rows, mass)
