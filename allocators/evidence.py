"""Window evidence: how much the recent queries use each slot, what mass segments are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from kvstitch.kernels.window_attention.api import window_usage_layers
from kvstitch.views import LayerView, QueryWindow
from kvstitch.views.queries import num_spaced

MASS_PADS = ("visible_mean", "head_max", "global_max")
POOL_EDGES = ("valid", "zero")
SINK_MASSES = ("exclude", "include")
QUERY_POSITIONS = ("own", "current")


@dataclass(frozen=True)
class Evidence:
    """Mean attention of the last W queries to each slot, pooled along the surviving sequence, averaged over G.

    Args:
        window_tokens: W; fewer if fewer queries are held.
        window_step: of those every so-manieth is asked (`QueryWindow.spaced`): a long window at the price of a short one.
        pool_kernel: odd width of the average, 1 for none.
        pool_edges: divisor where the kernel reaches past the first or last slot that counts: "valid" counts the taps
            that exist, "zero" always divides by `pool_kernel`.
        mass_pad: what the window's own slots get, which only a part of the queries see: "visible_mean", their mean
            over the queries that do; "head_max" or "global_max", the largest value before the window in the head, or
            in the whole batch as the public code does (rows then depend on each other).
        sink_mass: "exclude" gives the first `num_sinks` slots 0 and keeps them out of their neighbours' averages.
        query_positions: "current" turns every query to the newest one's position, as the public code does.
        num_sinks: first slots that `sink_mass` speaks of.
    """

    window_tokens: int
    pool_kernel: int
    pool_edges: str
    mass_pad: str
    sink_mass: str
    query_positions: str
    num_sinks: int
    window_step: int = 1

    def of_layers(
        self, views: Sequence[LayerView], valid: Bool[Tensor, "S H T"] | None, keep: Int64[Tensor, "S"]
    ) -> Float32[Tensor, "S H T"]:
        """Evidence of layers of equal shape; 0 on empty slots.

        Args:
            views: L layers with B rows each; S = L * B, layer after layer.
            valid: their valid slots; None if no slot is empty.
            keep: budget of each row.
        """
        windows = [_window(view, self.window_tokens, self.window_step) for view in views]
        places = torch.cat([window.positions for window in windows])
        if self.mass_pad != "visible_mean":
            places = _shorten(places, self._window_lengths(places, _Order.of(valid, views[0].keys.shape[2]), keep))
        queries = [window.rotated for window in windows]
        if self.query_positions == "current":
            queries = [_turned_to_newest(window, view) for window, view in zip(windows, views)]
        positions = torch.cat([view.positions for view in views])
        usage = window_usage_layers(
            queries, places, [view.keys for view in views], positions, [view.scaling for view in views]
        )
        return self._finish(usage, _Order.of(valid, usage.shape[-1]), places, keep)

    def _finish(self, raw: Tensor, order: "_Order", query_positions: Tensor, keep: Tensor) -> Tensor:
        """Pooling, padding of the window's own slots and exclusion of sinks."""
        first = min(self.num_sinks, raw.shape[-1] - 1) if self.sink_mass == "exclude" else 0
        packed = order.pack(raw)
        if self.mass_pad == "visible_mean":
            return order.unpack(self._pool(packed, first, order.count))
        window = self._window_lengths(query_positions, order, keep)[:, None, None]
        history = (order.count - window).clamp(min=first)
        unseen = torch.arange(raw.shape[-1], device=raw.device) >= history
        pooled = self._pool(packed.masked_fill(unseen, 0.0), first, history).masked_fill_(unseen, 0.0)
        dims = (-1,) if self.mass_pad == "head_max" else (0, 1, 2)
        return order.unpack(torch.where(unseen, pooled.amax(dim=dims, keepdim=True), pooled))

    def _pool(self, packed: Tensor, first: int, end: int | Tensor) -> Tensor:
        """Average over neighbours among the places from `first` to before `end`; 0 before `first`."""
        half = self.pool_kernel // 2
        inner = packed[..., first:]
        if half:
            inner = F.avg_pool1d(inner, self.pool_kernel, stride=1, padding=half)
            if self.pool_edges == "valid":
                place = torch.arange(first, packed.shape[-1], device=packed.device)
                before, after = (place - first).clamp(max=half), (end - 1 - place).clamp(min=0, max=half)
                inner = inner * self.pool_kernel / (before + after + 1)
        return F.pad(inner, (first, 0))

    def _window_lengths(self, query_positions: Tensor, order: "_Order", keep: Tensor) -> Tensor:
        """`[S]` int64: queries that each row uses, no more than it has, than slots before them, or than it keeps."""
        held = (query_positions >= 0).sum(dim=-1)
        fullest = order.count if order.index is None else order.count[..., 0].amax(dim=-1)
        return torch.minimum(held.clamp(max=fullest - 1), keep).clamp(min=1, max=self.window_tokens)


class _Order(NamedTuple):
    """Moves values between slots and their order among the valid slots of a head.

    index: `[B, H, T]` 1 + place of each valid slot, 0 for empty ones; None if there are none, and nothing moves.
    count: `[B, H, 1]` valid slots, or T.
    """

    index: Tensor | None
    count: Tensor | int

    @classmethod
    def of(cls, valid: Tensor | None, slots: int) -> "_Order":
        if valid is None:
            return cls(None, slots)
        rank = valid.cumsum(dim=-1)
        return cls(rank * valid, rank[..., -1:])

    def pack(self, x: Tensor) -> Tensor:
        """The values of the valid slots, in order, then zeros."""
        if self.index is None:
            return x
        batch, heads, slots = x.shape
        # What the empty slots hold goes to column 0, which is cut off.
        return x.new_zeros(batch, heads, slots + 1).scatter_(-1, self.index, x)[..., 1:]

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of `pack`; 0 on empty slots."""
        return packed if self.index is None else F.pad(packed, (1, 0)).gather(-1, self.index)


def _window(view: LayerView, window_tokens: int, step: int) -> QueryWindow:
    if step > 1 and view.spaced is not None:
        held = view.spaced
        # A scorer may have asked for more of them.
        return held if held.positions.shape[1] == num_spaced(step, window_tokens) else held.spaced(step, window_tokens)
    if view.queries is None:
        raise ValueError(f"the view holds no queries; this allocator needs the last {window_tokens} (see `needs`)")
    return view.queries.last(window_tokens) if step == 1 else view.queries.spaced(step, window_tokens)


def _shorten(positions: Int64[Tensor, "S W"], lengths: Int64[Tensor, "S"]) -> Int64[Tensor, "S W"]:
    """Drops the oldest queries of each row beyond its length."""
    age = torch.arange(positions.shape[-1] - 1, -1, -1, device=lengths.device)
    return positions.masked_fill(age >= lengths[:, None], -1)


def _turned_to_newest(window: QueryWindow, view: LayerView) -> Tensor:
    if view.rotary is None:
        raise ValueError("query_positions='current' needs the model's rotary in the view (see `needs`)")
    newest = window.positions.amax(dim=-1, keepdim=True).clamp(min=0).expand_as(window.positions)
    return view.rotary.rotate(window.unrotated(view.rotary), newest)
