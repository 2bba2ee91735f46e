"""A cache layer whose slots may be compacted at any time; what it stores is read by `kvstitch.presses.attention`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvstitch.kernels.compact.api import compact
from kvstitch.presses.queries import QueryMemory
from kvstitch.presses.shared_results import SharedResults
from kvstitch.presses.versions import length_after_crop, query_count
from kvstitch.views import LayerView, Needs, Rotary


class LayerAttachment(Protocol):
    """What a press keeps in a layer beside its slots, such as an index over them.

    Args:
        moved_padding: whether it put empty slots where the model's own masks do not expect them.
    """

    moved_padding: bool

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a batch operation (reorder, repeat, select) to everything held."""

    def detach(self, layer: "StitchLayer") -> None:
        """Puts the layer back into the order in which its tokens came, for whoever uses it next."""


@dataclass
class Request:
    """What all layers of one cache share: the tokens of the running forward and where the request stands.

    Args:
        positions: `[B, N]` RoPE position of each token of the running forward, -1 for padding.
        has_padding: whether any of them is padding.
        announced: True while a press stands behind the forward; stock attention then never sees compacted slots.
        in_prefill: True until the first single token after the prompt (a chunked prefill is not over before that).
        counted_from: logical length at the end of the prompt or at the last compaction; tokens after it count as decoded.
        num_events: compactions so far.
        beside: layers of the same cache that are not ours (sliding windows).
        shared: what one layer worked out for all.
    """

    positions: Tensor | None = None
    has_padding: bool = False
    announced: bool = False
    in_prefill: bool = True
    counted_from: int = 0
    num_events: int = 0
    beside: tuple[CacheLayerMixin, ...] = ()
    shared: SharedResults = field(default_factory=SharedResults, compare=False)

    def restart(self) -> None:
        """As it was before the first token."""
        vars(self).update(vars(Request(beside=self.beside, shared=self.shared)))

    def refuse_roll_back(self) -> None:
        """Raises:
        RuntimeError: a layer that is not ours has forgotten what it would take, and would say so after ours were cut.
        """
        for layer in self.beside:
            window = getattr(layer, "sliding_window", None)
            recorded = getattr(layer, "record_past", False)
            if window is not None and layer.is_initialized and layer.get_seq_length() >= window and not recorded:
                raise RuntimeError(
                    f"cannot roll the cache back: its sliding-window layers saw {layer.get_seq_length()} tokens and remember "
                    f"the last {window}"
                )


class StitchLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, `[B, H, length, D]` at the front of storage that grows in strides.

    Two lengths: `length` is physical (slots stored), `seen_tokens` logical (tokens of the sequence, what transformers
    derives positions from). They part at the first compaction. `positions` tells for every slot which RoPE position it
    holds, -1 where it is empty: padding, or a head that keeps fewer than its neighbours. Slots stand in the order in
    which their tokens came, so causality inside a forward is the order of slots, whatever was evicted before.

    Everything that must live as long as the request lives here, so that it follows beams, batch changes and turns.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(
        self, request: Request, needs: Needs = Needs(), rotary: Rotary | None = None, growth_tokens: int = 256
    ):
        super().__init__()
        self.request = request
        self.owner: object | None = None
        self._growth_tokens = growth_tokens
        self._storage: dict[str, Tensor] = {}
        self._bias: Tensor | None = None
        self.query_memory = QueryMemory(needs, rotary, self.request.shared)
        self.slot_state: dict[str, Tensor] = {}
        self.index: LayerAttachment | None = None
        self.length = 0
        self.seen_tokens = 0
        self.evicted_at = 0
        self._next_kept: Tensor | None = None
        self._row_padding: Tensor | None = None
        self.has_empty = False
        self._had_padding = False

    # -- what transformers calls ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads = key_states.shape[:2]
        self.dtype, self.device = key_states.dtype, key_states.device
        self._storage = {
            "keys": key_states.new_empty(batch, heads, 0, key_states.shape[-1]),
            "values": value_states.new_empty(batch, heads, 0, value_states.shape[-1]),
            # Half of the bytes of int64, and these count beside a cache of half precision.
            "positions": torch.empty(batch, heads, 0, dtype=torch.int32, device=self.device),
        }
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append the new tokens; returns all stored keys and values, `[B, H, length, D]` views without a copy.

        Raises:
            RuntimeError: outside a press, on a cache whose empty slots or padding only the press's attention can mask.
        """
        if not self.request.announced and self.index is not None and self.index.moved_padding:
            # The model's own masks are used, and an index is of no use without its order.
            self._drop_index()
        if not self.request.announced and self.was_compacted and (self.has_empty or self._had_padding):
            raise RuntimeError(
                "this cache was compacted with padding or unequal heads, which the model's own attention cannot mask; "
                "continue it inside `with press(model):`"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._storage["keys"].is_inference() and not torch.is_inference_mode_enabled():
            # What was made in inference mode can be read outside, but not written.
            self._map_rows(torch.clone)
        count = key_states.shape[2]
        self._reserve(self.length + count)
        new = slice(self.length, self.length + count)
        positions, has_padding = self._arriving_positions(count)
        self._storage["keys"][:, :, new] = key_states.detach()
        self._storage["values"][:, :, new] = value_states.detach()
        self._storage["positions"][:, :, new] = positions[:, None]
        self.length += count
        self.seen_tokens += count
        if has_padding:
            padding = (positions < 0).sum(dim=-1)
            self._row_padding = padding if self._row_padding is None else self._row_padding + padding
        if has_padding and not self.has_empty:
            self.has_empty = self._had_padding = True
            self._rebuild_bias()
        elif self.has_empty:
            self._fill_bias(new)
        self._refresh_views()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query: Tensor | int) -> tuple[int, int]:
        """(slots that attention will see, offset that makes the stock causal mask right)."""
        return self.length + query_count(query), self.seen_tokens - self.length

    @property
    def is_croppable(self) -> bool:
        """Asked before assisted decoding; an evicting cache must not be rolled back blindly."""
        return False

    def crop(self, tokens: int) -> None:
        """Remove tokens from the end: `-n`, or down to a length above 0 where this version of transformers says so.

        Raises:
            RuntimeError: tokens older than the last eviction, or queries that a scorer needs, would have to come back.
        """
        target = length_after_crop(tokens, self.seen_tokens)
        if target == self.seen_tokens:
            return
        if target < self.evicted_at or target < 0:
            raise RuntimeError(
                f"cannot roll the cache back to {target} tokens: slots were evicted at {self.evicted_at} tokens and what "
                "was evicted cannot be restored"
            )
        self.request.refuse_roll_back()
        if target == 0:
            self.reset()
            return
        self.query_memory.require_nothing_forgotten()
        self._drop_index()
        removed = self.seen_tokens - target
        if self._row_padding is not None:
            self._row_padding = self._row_padding - (self.stored_positions[:, 0, -removed:] < 0).sum(dim=-1)
        self.length -= removed
        self.seen_tokens = target
        self.request.counted_from = min(self.request.counted_from, target)
        # A slice would keep the removed tokens alive.
        self._storage = {name: tensor[:, :, : self.length].clone() for name, tensor in self._storage.items()}
        self.slot_state = {name: tensor[:, :, : self.length] for name, tensor in self.slot_state.items()}
        if self.has_empty:
            self._rebuild_bias()
        self._refresh_views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def reset(self) -> None:
        self._drop_index()
        self.request.restart()
        fresh = StitchLayer(self.request, growth_tokens=self._growth_tokens)
        fresh.owner = self.owner
        fresh.query_memory = self.query_memory.fresh()
        self.__dict__.update(fresh.__dict__)

    def offload(self) -> None:
        raise NotImplementedError("kvstitch does not support offloaded caches: keys and values must stay on the device")

    prefetch = offload

    # -- what presses call ------------------------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        """`[B, H, length]` int64 RoPE position of each slot, -1 where it is empty: a copy, which no decode step needs."""
        return self.stored_positions.long()

    @property
    def stored_positions(self) -> Tensor:
        """`positions` as they are stored: int32, a view."""
        return self._storage["positions"][:, :, : self.length]

    @property
    def bias(self) -> Tensor | None:
        """`[B, H, length]` added to the logits: 0, or the lowest finite value on empty slots; None if none is empty."""
        return self._bias[:, :, : self.length] if self.has_empty else None

    @property
    def had_padding(self) -> bool:
        """Whether any token that ever came was padding."""
        return self._had_padding

    @property
    def was_compacted(self) -> bool:
        return self.evicted_at > 0

    @property
    def fits_masks(self) -> bool:
        """Whether the model's own masks are right: nothing was evicted, and padding stands where it came."""
        return not self.was_compacted and not (self.index is not None and self.index.moved_padding)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storage behind keys and values, room for growth included."""
        if not self.is_initialized:
            return 0
        return sum(self._storage[name].untyped_storage().nbytes() for name in ("keys", "values"))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values in slots that are not empty."""
        if not self.is_initialized:
            return 0
        per_slot = sum(tensor.shape[-1] * tensor.element_size() for tensor in (self.keys, self.values))
        return int((self.stored_positions >= 0).sum()) * per_slot

    def view(self, scaling: float, rotary: Rotary | None, layer_idx: int, num_layers: int) -> LayerView:
        """What scorers and allocators may see of this layer now."""
        positions = self.positions
        return LayerView(
            keys=self.keys,
            values=self.values,
            positions=positions,
            valid=positions >= 0,
            scaling=scaling,
            next_position=self.next_position(),
            layer_idx=layer_idx,
            num_layers=num_layers,
            queries=self.query_memory.window(),
            spaced=self.query_memory.spaced(),
            statistics=self.query_memory.statistics(),
            rotary=rotary,
        )

    def row_tokens(self) -> Tensor:
        """`[B]` int64 tokens that each row has seen, padding excluded."""
        seen = torch.full((self.keys.shape[0],), self.seen_tokens, device=self.device)
        return seen if self._row_padding is None else seen - self._row_padding

    def next_position(self) -> Tensor:
        """`[B]` int64 RoPE position of the token that comes next, if positions go on as they came."""
        stored = self.stored_positions.amax(dim=(1, 2)).long() + 1
        return stored if self._next_kept is None else torch.maximum(stored, self._next_kept)

    def keep(self, slots: Tensor, state: dict[str, Tensor] | None = None, hidden: Tensor | None = None) -> None:
        """Keep only `slots` `[B, H, K]`, ascending in each head, -1 where a head or row keeps fewer than K.

        The storage afterwards holds exactly K slots per head: what was evicted is given back at once. `state` is what
        the allocator wants carried along, aligned with `slots`. Slots marked in `hidden` `[B, H, K]` stay stored but
        count as empty from now on: nothing attends to them again.
        """
        if slots.shape[-1] < self.length:
            # The newest token may be among those that go.
            self._next_kept = self.next_position()
        # K is what the fullest head keeps; columns that are empty in every head would be stored for nothing.
        most = int((slots >= 0).sum(dim=-1).max())
        slots = slots[..., :most]
        old = self._storage
        self._storage = {name: tensor.new_empty(*slots.shape, *tensor.shape[3:]) for name, tensor in old.items()}
        # Into storage of its own, not in place: what was evicted can only be given back with the storage that held it.
        fills = [-1 if name == "positions" else None for name in old]
        compact(list(old.values()), slots, fills, list(self._storage.values()))
        if hidden is not None:
            self._storage["positions"].masked_fill_(hidden[..., :most], -1)
        self.slot_state = {name: tensor[:, :, :most] for name, tensor in (state or {}).items()}
        self.length = slots.shape[2]
        self.evicted_at = self.seen_tokens
        self.has_empty = bool((self._storage["positions"] < 0).any())
        self._bias = None
        if self.has_empty:
            self._rebuild_bias()
        self._refresh_views()

    def permute(self, order: Tensor) -> None:
        """Put the slots into another order `[B, H, length]`; nothing is evicted."""
        evicted_at = self.evicted_at
        self.keep(order)
        self.evicted_at = evicted_at

    def serve(self, needs: Needs, rotary: Rotary | None, growth_tokens: int) -> None:
        """Work for another press from now on: what the last one kept about queries and slots means nothing to it."""
        self._drop_index()
        self.query_memory = QueryMemory(needs, rotary, self.request.shared)
        self.slot_state = {}
        self._growth_tokens = growth_tokens

    def _drop_index(self) -> None:
        index, self.index = self.index, None
        if index is not None:
            index.detach(self)

    # -- storage ----------------------------------------------------------------------------------------------------

    def _arriving_positions(self, count: int) -> tuple[Tensor, bool]:
        if self.request.announced:
            return self.request.positions.to(self.device), self.request.has_padding
        # Outside a press nobody announces the tokens; they continue the sequence of each row.
        start = self.next_position()[:, None] if self._had_padding else self.seen_tokens
        return start + torch.arange(count, device=self.device)[None], False

    def _reserve(self, length: int) -> None:
        """Grow the storage so that `length` slots fit: amortised, instead of a concatenation at every step."""
        if length <= self._storage["keys"].shape[2]:
            return
        # A first forward gets what it needs: most prompts are much longer than what is decoded after them.
        capacity = max(length, self.length + max(self._growth_tokens, self.length // 4))
        for name, old in self._storage.items():
            new = old.new_empty(*old.shape[:2], capacity, *old.shape[3:])
            new[:, :, : self.length] = old[:, :, : self.length]
            self._storage[name] = new
        if self.has_empty:
            self._rebuild_bias()

    def _rebuild_bias(self) -> None:
        positions = self._storage["positions"]
        self._bias = torch.zeros(positions.shape, dtype=self.dtype, device=self.device)
        self._fill_bias(slice(0, self.length))

    def _fill_bias(self, slots: slice) -> None:
        empty = self._storage["positions"][:, :, slots] < 0
        self._bias[:, :, slots] = empty.to(self.dtype) * torch.finfo(self.dtype).min

    def _refresh_views(self) -> None:
        self.keys = self._storage["keys"][:, :, : self.length]
        self.values = self._storage["values"][:, :, : self.length]

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self._storage = {name: function(tensor) for name, tensor in self._storage.items()}
        self.slot_state = {name: function(tensor) for name, tensor in self.slot_state.items()}
        self._bias = None if self._bias is None else function(self._bias)
        self._next_kept = None if self._next_kept is None else function(self._next_kept)
        self._row_padding = None if self._row_padding is None else function(self._row_padding)
        self.query_memory.map_rows(function)
        if self.index is not None:
            self.index.map_rows(function)
        self._refresh_views()
