"""The contract of a retrieving allocator: an index over the full cache, and the slots that each decode step reads."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Float, Float32, Int, Int32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.background import Background
from kvstitch.views import LayerView


@dataclass(frozen=True)
class ReadPlan:
    """How the reads of one decode step divide: sinks, retrieved slots, the newest tokens; each counted once.

    Args:
        budgets: slots per kv head that a step may read, one a row.
        num_sinks: first real tokens of each row, always read.
        num_recent: newest tokens, the current one included, always read.
    """

    budgets: tuple[int, ...]
    num_sinks: int
    num_recent: int

    @property
    def retrieved(self) -> tuple[int, ...]:
        """Slots that each row retrieves."""
        return tuple(budget - self.num_sinks - self.num_recent for budget in self.budgets)

    @property
    def width(self) -> int:
        """Slots that the largest row reads."""
        return max(self.budgets)


@dataclass(frozen=True)
class LayerFrame:
    """What an index knows about its layer from the start.

    Args:
        layer_idx: index of the decoder layer.
        group: G, query heads per kv head.
        num_sinks: first real tokens of each row, always read.
        scaling: factor on q.k in the model's attention.
        background: where work may run while later layers compute.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2), or None.
        sink_logits: `[Q]` learned logits that take mass (GPT-OSS), or None.
    """

    layer_idx: int
    group: int
    num_sinks: int
    scaling: float | int
    background: Background
    softcap: float | None = None
    sink_logits: Tensor | None = None


@dataclass(frozen=True)
class DecodeStep:
    """One layer at one decode step; the current token is already stored. Nothing here is a copy.

    Args:
        query: `[B, Q, 1, D]` after RoPE; head `h * G + g` reads kv head `h`.
        keys: `[B, H, T, D]`.
        values: `[B, H, T, D]`.
        positions: `[B, H, T]` int32, -1 where a slot is empty.
        has_padding: whether any row's current token may be padding.
    """

    query: Float[Tensor, "B Q 1 D"]
    keys: Float[Tensor, "B H T D"]
    values: Float[Tensor, "B H T D"]
    positions: Int32[Tensor, "B H T"]
    has_padding: bool = False

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """G, query heads per kv head."""
        return self.query.shape[1] // self.keys.shape[1]


@dataclass(frozen=True)
class Rest:
    """Centroids that stand in for what is not read (Multipole attention, arXiv 2506.13059).

    Args:
        scores: `[B, S, N, K]` q.k of each query head of a selection with each centroid, unscaled.
        values: `[B, S, K, D]` mean values, S as in `Reads`.
        log_counts: `[B, S, K]` log of the tokens of each region that are not read; -inf where all are.
    """

    scores: Float32[Tensor, "B S N K"]
    values: Float[Tensor, "B S K D"]
    log_counts: Float32[Tensor, "B S K"]


@dataclass(frozen=True)
class Reads:
    """The slots that one decode step attends to in one layer.

    Args:
        slots: `[B, S, M]`, S = H (the heads of a group read the same) or Q; no slot twice; -1 for nothing. May be
            overwritten at the next step.
        complete: True if no entry is -1, so that attention needs no mask.
        rest: what stands in for the rest of the cache, or None.
        index_rows: vectors of D numbers per kv head that were read to choose or stood in: centroids, bounds, mean values.
        index_bytes: of those vectors, in the dtypes that they are held in.
        key_rows: keys per selection that were read to choose; a number, or `[B, S]`.
    """

    slots: Int64[Tensor, "B S M"]
    complete: bool
    rest: Rest | None = None
    index_rows: int = 0
    index_bytes: int = 0
    key_rows: int | Tensor = 0


class LayerIndex(ABC):
    """The index of one layer. It lives in the cache layer, so it follows the request through beams and batches."""

    # How many of the largest weights of each step `update` wants to see; 0: none.
    update_top_k: int = 0
    # What the index was started with, if it needs to know.
    frame: LayerFrame | None = None

    def work_in(self, background: Background) -> None:
        """Leaves work to this pool from now on: a run that goes on with a cache has one of its own."""
        if self.frame is not None and self.frame.background is not background:
            self.frame = replace(self.frame, background=background)

    def observe(  # noqa: B027
        self,
        query: Float[Tensor, "B Q N D"],
        keys: Float[Tensor, "B H T D"],
        positions: Int64[Tensor, "B H T"],
        has_empty: bool,
    ) -> None:
        """Takes in a forward of several tokens, chunk by chunk, before `build`.

        Args:
            query: their queries after RoPE; their keys are the last N slots.
            keys: everything stored.
            positions: -1 where a slot is empty.
            has_empty: whether any slot is.
        """

    def attend(
        self,
        query: Float[Tensor, "B Q N D"],
        keys: Float[Tensor, "B H T D"],
        values: Float[Tensor, "B H T D"],
        positions: Int64[Tensor, "B H T"],
    ) -> Float[Tensor, "B Q N D"] | None:
        """`observe` where no slot is empty, and the attention's output, which costs little beside; None: not done."""
        return None

    def prepare(self) -> None:  # noqa: B027
        """Starts what `build` will wait for; called for all layers before the first `build`."""

    @abstractmethod
    def build(
        self, view: LayerView, plan: ReadPlan, scores: Float32[Tensor, "B H T"] | None = None
    ) -> Int64[Tensor, "B H T"] | None:
        """Makes the index ready for decoding over everything that is stored, or brings it up to date.

        Args:
            view: the layer now.
            plan: what each step may read.
            scores: a scorer's scores, if `needs_scores`.

        Returns: the order in which the storage must be put, or None if it stays. The caller permutes every head before
            the next step; slots of the last `plan.num_recent` tokens never move.
        """

    @abstractmethod
    def select(self, step: DecodeStep) -> Reads:
        """The slots to attend to. Costs no memory that grows with the cache, and no host sync."""

    def update(self, step: DecodeStep, weights: Float32[Tensor, "B U K"], slots: Int[Tensor, "B U K"]) -> None:  # noqa: B027
        """Takes in the `update_top_k` largest weights outside the sinks of the step's attention (weight 0, slot -1: none)."""

    def due(self, length: int) -> bool:
        """Whether `build` should run again before the next step, with `length` slots stored now; host integers only."""
        return False

    @abstractmethod
    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a batch operation (reorder, repeat, select) to everything held."""

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes held beside the cache."""

    def describe(self) -> dict[str, Tensor]:
        """What the events show and plots draw (labels, sizes, modularity), by name."""
        return {}


class RetrievingAllocator(ABC):
    """Chooses what each decode step reads of a complete cache. Frozen dataclass; state lives in its indices."""

    # Whether `build` orders members by a scorer, which the press must then be given.
    needs_scores: bool = False

    def check_prompt(self, num_tokens: int, num_sinks: int) -> None:  # noqa: B027
        """Raises:
        ValueError: these options are not for a prompt of so few tokens (without padding) that does not fit its budget.
        """

    @abstractmethod
    def start(self, frame: LayerFrame) -> LayerIndex:
        """An empty index for one layer of one request."""
