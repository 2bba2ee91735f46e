"""An index of regions: which are read, how the last one is cut, and what happens to new tokens."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int, Int32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.base import DecodeStep, LayerFrame, LayerIndex, ReadPlan, Reads, Rest
from kvstitch.allocators.retrieval.exact import best_of_shortlist, rank_range
from kvstitch.allocators.retrieval.growth import Growth
from kvstitch.allocators.retrieval.layout import Layout, lay_out
from kvstitch.allocators.retrieval.members import TailMembers
from kvstitch.allocators.retrieval.parents import joined, sorted_by_parent
from kvstitch.allocators.retrieval.reading import Parts, ReadBuffer, empty_first
from kvstitch.allocators.retrieval.rows import gather_known_rows
from kvstitch.allocators.retrieval.scoring import Ratings, combined, query_rows, rate_regions
from kvstitch.allocators.retrieval.store import RegionStore, bounds_of, centroids
from kvstitch.allocators.retrieval.tree import RegionTree, score_columns
from kvstitch.kernels.common.ranges import expand_ranges, unit_steps
from kvstitch.views import LayerView

TRUNCATIONS = ("recent", "score", "exact")
# Labels of new tokens are written into room that grows in strides.
_ROOM = 256


@dataclass(frozen=True)
class RegionOptions:
    """How regions are read.

    Args:
        combine: see `rate_regions`.
        select: see `rate_regions`.
        truncation: which members of the region that does not fit are read: the newest, those a scorer puts first, or
            those with the largest exact q.k, for which all its keys are read.
        shortlist: regions are read until this many times the retrieved slots are listed; exact q.k picks among them.
        replacement: how many of the best regions stand in, by their centroids, for their members that are not read.
        bounds: whether representatives are bounds instead of centroids.
        grows_higher: whether a tree gets another level when its top has grown wide.
        new_tokens: of a region that opens while the model decodes; a tree must list enough of them.
    """

    combine: str = "mean"
    select: str = "kv_head"
    truncation: str = "recent"
    shortlist: float | int = 1.0
    replacement: int = 0
    bounds: bool = False
    grows_higher: bool = False
    new_tokens: int = 16


def check_shortlist(options: object) -> None:
    """Raise unless the `shortlist` of an allocator is a finite number from 1."""
    value = options.shortlist
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"shortlist must be a number, got {value!r}")
    if not value >= 1:
        raise ValueError(f"shortlist must be at least 1 (no shortlist), got {value}; the nearest valid value is 1")
    if value == math.inf:
        raise ValueError(
            f"shortlist must be finite, got {value}; to choose among all keys take OracleRetrieval, which reads all of them"
        )


class RegionIndex(LayerIndex):
    """Regions of the slots of one layer; how they come about is the subclass's.

    Args:
        frame: the layer.
        options: how regions are read.
        growth: what happens to new tokens.
    """

    # Whether the storage is put in the order of regions; otherwise an index holds the order.
    permutes = True

    def __init__(self, frame: LayerFrame, options: RegionOptions, growth: Growth):
        self.frame = frame
        self.options = options
        self.growth = growth
        self.update_top_k = growth.update_top_k
        self.tail_start = 0
        self.store: RegionStore | None = None
        self.labels: Tensor | None = None
        # Coarser regions of each slot, nearest first, if `partition` finds a tree.
        self.coarse: list[Tensor] = []
        self._tree: RegionTree | None = None
        self._order: Tensor | None = None
        self._members: TailMembers | None = None
        self._buffer: ReadBuffer | None = None
        self._unit_steps: Tensor | None = None
        self._widest = self._num_built = 0

    @abstractmethod
    def partition(self, view: LayerView, parts: Parts) -> Int64[Tensor, "B U T"]:
        """The region of each slot of the body, from 0, and of newer slots if they have one; -1 elsewhere.

        U is H, or Q if every query head has regions of its own.
        """

    # -- building ---------------------------------------------------------------------------------------------------

    def build(
        self, view: LayerView, plan: ReadPlan, scores: Float32[Tensor, "B H T"] | None = None
    ) -> Int64[Tensor, "B H T"] | None:
        parts = Parts.of(view, plan)
        above = self._tree_above(view.positions.shape[-1])
        labels = self.partition(view, parts)
        units, heads = labels.shape[1], view.keys.shape[1]
        body, sinks, positions = (per_unit(x, units) for x in (parts.body, parts.sinks, view.positions))
        may_have = per_unit(view.valid, units) & ~sinks if self.growth.keeps_labels else body
        ranks = None if scores is None else per_unit(scores, units)
        coarse = joined(above, self.coarse)
        # Aligned with the slots before they are put in order; nobody needs it again.
        self.coarse = []
        labels, parents = sorted_by_parent(torch.where(may_have, labels, -1), coarse, self.options.grows_higher)
        layout = lay_out(labels, positions, sinks, body, parts.boundary, ranks)
        self.store = self._represent(view, layout, body, by_row=bool(parents))
        permuted = self.permutes and units == heads
        order = layout.order if permuted else empty_first(view, parts)
        moved = None if order is None else per_unit(order, units)
        self._order = None if permuted else _new_places(layout.order, moved).int()
        # Ranges tell the regions of their slots; members elsewhere need labels, and so does a pick among a shortlist.
        self.labels = None
        if self.growth.joins_built or (self.options.replacement and self.options.shortlist > 1):
            self.labels = (layout.labels if moved is None else layout.labels.gather(-1, moved)).int()
        self.tail_start = parts.boundary
        self._widest, self._num_built = int(layout.sizes.max()), self.store.num
        self._members = TailMembers(self.store) if self.growth.joins_built else None
        selections = heads * self.frame.group if self.options.select == "query_head" else units
        self._buffer = ReadBuffer(plan, parts, selections, self.options.shortlist)
        self._tree = self._plant(parents)
        self.growth.begin(self, layout)
        return order

    def known_labels(self, length: int) -> Int64[Tensor, "B U T"] | None:
        """The present region of each slot, -1 for those that have none yet; None before the first build."""
        if self.store is None:
            return None
        if self.labels is None:
            return self._labels_of_ranges(length)
        self.reserve(length)
        labels = self.labels[..., :length].long()
        if not self.growth.keeps_labels:
            labels[..., self._buffer.boundary :] = -1
        return labels

    def _labels_of_ranges(self, length: int) -> Int64[Tensor, "B U T"]:
        """By place, where ranges stand one after another in the order of columns; then by slot."""
        starts, sizes = self.store.starts.long(), self.store.sizes.long()
        place = torch.arange(length, device=starts.device).expand(*starts.shape[:2], length).contiguous()
        label = torch.searchsorted((starts + sizes).contiguous(), place, right=True)
        at = label.clamp(max=self.store.num - 1)
        label = torch.where((label == at) & (place >= starts.gather(-1, at)), label, -1)
        if self._order is None:
            return label
        self.reserve(length)
        return torch.empty_like(label).scatter_(-1, self._order[..., :length].long(), label)

    def _tree_above(self, length: int) -> list[Int64[Tensor, "B U T"]]:
        """The nodes above the present region of each slot, for a build that finds no new ones."""
        return [] if self._tree is None else self._tree.parents_of(self.known_labels(length))

    def _represent(self, view: LayerView, layout: Layout, body: Bool[Tensor, "B U T"], by_row: bool) -> RegionStore:
        # Only rules that give a token its region when it comes count those in the window.
        labels = layout.labels if self.growth.keeps_labels else torch.where(body, layout.labels, -1)
        num = layout.starts.shape[-1]
        rows = (bounds_of if self.options.bounds else centroids)(view.keys, labels, num)
        if view.keys.element_size() == 2 and not self.growth.joins_built and not by_row:
            # Half of the bytes beside the cache, and scores are no finer than the keys that they stand for. Means that
            # move with every token, and sums over a tree, would lose what is added to them.
            rows = rows.to(view.keys.dtype)
        values = centroids(view.values, labels, num).to(view.values.dtype) if self.options.replacement else None
        return RegionStore(layout, rows, values, has_listed=self.growth.joins_built, by_row=by_row)

    def _plant(self, parents: list[Tensor]) -> RegionTree | None:
        if not parents:
            return None
        options = self.options
        return RegionTree(self.store, parents, self._buffer.listed, options.new_tokens, options.grows_higher)

    # -- decoding ---------------------------------------------------------------------------------------------------

    def select(self, step: DecodeStep) -> Reads:
        for slot in self._buffer.advance(step.length):
            self.growth.leave(self, slot, step, self._buffer.joins(slot))
        if self._tree is not None:
            self._tree.take_in(self.store)
        options = self.options
        rated, columns = self._rate(step)
        # No more than there are: any shortlist is as good as one of all slots.
        listed = min(self._buffer.most_listed, step.length)
        wanted = min(rated.ratings.shape[-1], max(listed, options.replacement))
        top = rated.ratings.topk(wanted, dim=-1).indices
        best = top if columns is None else columns.gather(-1, top)
        counts = self._of(self.store.counts, best.clamp(min=0) if columns is not None else best)
        if columns is not None:
            counts, best = counts.masked_fill_(best < 0, 0), best.clamp_(min=0)
        ends = counts.cumsum(-1)
        slots = self._read(step, best, counts, ends, listed)
        key_rows: int | Tensor = 0
        if options.shortlist > 1:
            slots, key_rows = self._pick(step, slots, ends, listed)
        elif options.truncation == "exact":
            key_rows = self._cut_exactly(step, slots, best, counts, ends)
        chosen, complete = self._buffer.fill(slots, step, None if columns is None else ends[..., -1:])
        if not options.replacement:
            return Reads(chosen, complete, None, self._index_rows(step), self._index_bytes(step, 0), key_rows)
        left = self._left_of_shortlist(chosen, best) if options.shortlist > 1 else _left(counts, ends, self._limit)
        few = slice(0, options.replacement)
        rest = self._rest(best[..., few], top[..., few], left[..., few], rated.scores)
        # Selections that share a head each have their own.
        stand_ins = rest.values.shape[2] * (rest.values.shape[1] // step.keys.shape[1])
        rows, num_bytes = self._index_rows(step) + stand_ins, self._index_bytes(step, stand_ins)
        return Reads(chosen, complete, rest, rows, num_bytes, key_rows)

    def _rate(self, step: DecodeStep) -> tuple[Ratings, Int64[Tensor, "B S X"] | None]:
        """Ratings of all regions, or of those that a tree proposes, and their columns."""
        options, query = self.options, step.query.float()
        if self._tree is None:
            return rate_regions(
                self.store,
                query,
                options.combine,
                options.select,
                self.frame.scaling,
                options.bounds,
                want_scores=options.replacement > 0,
            ), None
        units = query.shape[1] if options.select == "query_head" else self.store.starts.shape[1]
        rows = query_rows(query, units, options.bounds)
        columns = self._tree.candidates(self.store, rows, options.combine, self.frame.scaling)
        used = self.store.vector_rows[:, :, : self.store.num]
        scores = score_columns(used, self.store.bias, columns, rows)
        return Ratings(combined(scores, options.combine, self.frame.scaling), scores), columns

    def _index_rows(self, step: DecodeStep) -> int:
        """Vectors of D that a step reads per kv head to choose: all of each unit, or what each selection looks up in a tree."""
        heads, units = step.keys.shape[1], self.store.starts.shape[1]
        if self._tree is None:
            rows = self.store.num * (units // heads)
        else:
            selections = step.query.shape[1] if self.options.select == "query_head" else units
            rows = self._tree.num_rows(self.store) * (selections // heads)
        return rows * (2 if self.options.bounds else 1)

    def _index_bytes(self, step: DecodeStep, stand_ins: int) -> int:
        """Of the vectors that `_index_rows` counts, and of the mean values of those that stand in."""
        vectors = self._index_rows(step) * step.keys.shape[-1] * self.store.vectors.element_size()
        return vectors + stand_ins * step.values.shape[-1] * step.values.element_size()

    def update(self, step: DecodeStep, weights: Float32[Tensor, "B U K"], slots: Int[Tensor, "B U K"]) -> None:
        self.growth.update(self, step, weights, slots)

    def _read(self, step: DecodeStep, best: Tensor, counts: Tensor, ends: Tensor, width: int) -> Tensor:
        """Slots of the given regions one after another, `[B, S, width + 1]`, the last column without meaning."""
        starts = self._of(self.store.starts, best)
        if self.store.num > self._num_built and not self.growth.joins_built:
            # Ranges of new tokens stand in the order of time: what is left out of the last is its beginning.
            starts = starts + _left(counts, ends, self._limit) * (best >= self._num_built)
        if self._members is not None:
            # The listed members come first in a region's columns; they are written over what the range gives there.
            starts = starts - (counts - self._of(self.store.sizes, best))
        if self._unit_steps is None or len(self._unit_steps) != width + 1:
            self._unit_steps = unit_steps(width, best.device)
        slots = expand_ranges(starts, counts, ends, self._unit_steps)
        if self._order is not None:
            self.reserve(step.length)
            slots = self._expanded(self._order, slots).gather(-1, slots.clamp(0, step.length - 1)).long()
        if self._members is not None:
            self._members.place(slots, best, (ends - counts).clamp_(max=width), self.tail_start)
        return slots

    def _pick(self, step: DecodeStep, slots: Tensor, ends: Tensor, listed: int) -> tuple[Tensor, int | Tensor]:
        slots = slots[..., :listed]
        valid, key_rows = None, listed
        # A row lists as much as it would alone; and a tree may propose less than there is.
        if self._buffer.limits is not None or self._tree is not None or self._buffer.least_total < listed:
            own = ends[..., -1:].clamp(max=self._limit)
            valid, key_rows = torch.arange(listed, device=slots.device) < own, own[..., 0]
            slots = torch.where(valid, slots, 0)
        return best_of_shortlist(step, slots, valid, self._buffer.width, self.frame.scaling), key_rows

    def _cut_exactly(self, step: DecodeStep, slots: Tensor, best: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        limit = self._limit
        num_whole = (ends <= limit).sum(dim=-1, keepdim=True)
        at = num_whole.clamp(max=best.shape[-1] - 1)
        region = best.gather(-1, at)
        sizes = self._of(self.store.sizes, region)
        first_column = ends.gather(-1, at) - sizes
        room = (limit - first_column).clamp_(min=0)
        sizes = sizes * ((num_whole < best.shape[-1]) & (room > 0))
        order = None if self._order is None else self._expanded(self._order, slots)
        starts = self._of(self.store.starts, region)
        rank_range(step, slots, starts, sizes, first_column, room, self._widest, order)
        return sizes[..., 0]

    @property
    def _limit(self) -> Tensor | int:
        """Slots that each row lists."""
        return self._buffer.most_listed if self._buffer.limits is None else self._buffer.listed[:, None, None]

    def _left_of_shortlist(self, chosen: Tensor, best: Tensor) -> Tensor:
        retrieved = chosen[..., -self._buffer.width :]
        labels = self._expanded(self.labels, chosen).gather(-1, retrieved.clamp(min=0)).long().clamp_(min=0)
        counts = self._expanded(self.store.counts, chosen).to(torch.int64, copy=True)
        return counts.scatter_add_(-1, labels, -(retrieved >= 0).long()).gather(-1, best)

    def _rest(self, best: Tensor, top: Tensor, left: Tensor, scores: Tensor) -> Rest:
        by_selection = scores.view(*best.shape[:2], -1, scores.shape[-1])
        return Rest(
            scores=by_selection.gather(-1, top[:, :, None].expand(-1, -1, by_selection.shape[2], -1)),
            values=gather_known_rows((self.store.values,), best)[0],
            log_counts=left.float().log_(),
        )

    # -- what growth rules call ---------------------------------------------------------------------------------------

    def per_unit(self, x: Tensor) -> Tensor:
        """`[B, H, ...]` for each unit that has regions, `[B, U, ...]`."""
        return per_unit(x, self.store.starts.shape[1])

    def label(self, slots: slice, labels: "Tensor | int") -> None:
        """Writes down the region `[B, U, N]` of new slots."""
        if self.labels is not None:
            self.reserve(slots.stop)
            self.labels[..., slots] = labels

    def reserve(self, length: int) -> None:
        """Makes room for the labels and the order of `length` slots."""
        if self.labels is not None and length > self.labels.shape[-1]:
            self.labels = torch.nn.functional.pad(self.labels, (0, length + _ROOM - self.labels.shape[-1]), value=-1)
        if self._order is not None and length > self._order.shape[-1]:
            new = torch.arange(self._order.shape[-1], length + _ROOM, dtype=torch.int32, device=self._order.device)
            self._order = torch.cat((self._order, new.expand(*self._order.shape[:2], -1)), dim=-1)

    def list_member(self, labels: Int64[Tensor, "B U 1"], joins: Bool[Tensor, "B 1"] | None) -> None:
        """The next slot that left the window becomes a member of a built region."""
        self._members.append(labels, joins)

    # -- the rest of the contract -------------------------------------------------------------------------------------

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.store is None:
            return
        self.labels = None if self.labels is None else function(self.labels)
        self._order = None if self._order is None else function(self._order)
        self.growth.map_rows(function)
        for part in (self.store, self._members, self._buffer, self._tree):
            if part is not None:
                part.map_rows(function)

    @property
    def stored_bytes(self) -> int:
        if self.store is None:
            return 0
        order = 0 if self._order is None else self._order.untyped_storage().nbytes()
        labels = 0 if self.labels is None else self.labels.untyped_storage().nbytes()
        steps = 0 if self._unit_steps is None else self._unit_steps.untyped_storage().nbytes()
        parts = sum(x.stored_bytes for x in (self._members, self._buffer, self._tree) if x is not None)
        return self.store.stored_bytes + self.growth.stored_bytes + labels + order + steps + parts

    def describe(self) -> dict[str, Tensor]:
        return {} if self.store is None else {"sizes": self.store.counts.clone()}

    def _of(self, x: Int32[Tensor, "B U C"], columns: Int64[Tensor, "B S K"]) -> Int64[Tensor, "B S K"]:
        return self._expanded(x, columns).gather(-1, columns).long()

    @staticmethod
    def _expanded(x: Tensor, like: Tensor) -> Tensor:
        """`[B, U, ...]` for each selection."""
        return per_unit(x, like.shape[1])


def _left(counts: Tensor, ends: Tensor, limit: "Tensor | int") -> Tensor:
    """Members of each region that are not read, if regions are read one after another up to `limit`."""
    return (ends - limit).clamp_(min=0).minimum(counts)


def _new_places(slots: Int64[Tensor, "B U T"], order: Int64[Tensor, "B U T"] | None) -> Int64[Tensor, "B U T"]:
    """Where the given slots are once the storage has been put in `order`."""
    if order is None:
        return slots
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place).gather(-1, slots)


def per_unit(x: Tensor, units: int) -> Tensor:
    """`[B, H, ...]` for each of `units` units, of which several in a row may share a head."""
    return x if x.shape[1] == units else x.repeat_interleave(units // x.shape[1], dim=1)
