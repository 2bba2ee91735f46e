"""Retrieval: every key and value stays in the cache, and each decoded token reads a part of them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from kvstitch.allocators.retrieval import ReadPlan, RetrievingAllocator
from kvstitch.presses.budget import Budget
from kvstitch.presses.options import require_type
from kvstitch.presses.retrieval_events import IndexEvent, ReadEvent
from kvstitch.presses.retrieval_run import RetrievalRun
from kvstitch.scorers import Scorer

_MOST_RECENT = 32


@dataclass(frozen=True)
class RetrievalPress:
    """Reads a part of a complete cache at every decoded token.

    The prompt is read densely, in one piece or in chunks; when it is complete, each layer gets its index. From then on a
    step attends exactly to sinks, retrieved slots and the newest tokens, the current one included, each counted once
    inside the budget. A forward of several tokens (a second turn) is dense, and the index takes it in afterwards. As long
    as everything fits the budget, everything is read.

    A prompt that fits is observed all the same (edges, if the allocator wants them): the text may outgrow the budget later,
    its queries are gone by then, and to keep them would take as much memory as its keys, G times as much with grouped heads.
    What is made of the observed, such as communities, waits until the budget is nearly full.

    Args:
        allocator: what is read.
        budget: slots per kv head and step: tokens (1024), a fraction of a row's tokens (0.1) or bytes of keys and values
            that a step reads of one row ("4MiB"); the last two are turned into slots whenever an index is built, where a
            fraction that holds less than sinks, window and one slot more is lifted to that.
        num_sinks: first tokens of each row, always read.
        num_recent: newest tokens, always read, the current one included; None: 32, or a quarter of a smaller budget.
        dense_layers: first decoder layers that read everything.
        scorer: for allocators that order the members of a region by a score.
        workers: threads for work beside the forward pass; None: as many as the process has cores. 0: none.
        record_events: keep what each index was like in `run.events`.
        on_event: called with each `IndexEvent`.
        on_read: called with a `ReadEvent` for each layer of each step; costs a copy of the slots.
        measure_mass: tell `on_read` how much attention was read, for which each step looks at all keys.
    """

    allocator: RetrievingAllocator
    budget: Budget | int | float | str
    num_sinks: int = 10  # arXiv 2610.00418
    num_recent: int | None = None
    dense_layers: int = 0
    scorer: Scorer | None = None
    workers: int | None = None
    # Who watches does not change what is done, so a cache stays with a press that differs in these only.
    record_events: bool = field(default=True, compare=False)
    on_event: Callable[[IndexEvent], None] | None = field(default=None, compare=False)
    on_read: Callable[[ReadEvent], None] | None = field(default=None, compare=False)
    measure_mass: bool = field(default=False, compare=False)

    def __post_init__(self):
        require_type("allocator", self.allocator, RetrievingAllocator)
        object.__setattr__(self, "budget", Budget.of(self.budget))
        least = {"num_sinks": 0, "num_recent": 1, "dense_layers": 0, "workers": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None and name in ("num_recent", "workers"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"`{name}` must be an integer of at least {low}, got {value!r}")
        for name in ("record_events", "measure_mass"):
            require_type(name, getattr(self, name), bool)
        if self.allocator.needs_scores != (self.scorer is not None):
            wanted = (
                "orders members by a score: give the press a `scorer`"
                if self.scorer is None
                else "asks for no `scorer`"
            )
            raise ValueError(f"{type(self.allocator).__name__} with these options {wanted}")
        if self.scorer is not None:
            require_type("scorer", self.scorer, Scorer)
        if self.budget.tokens is not None:
            self.plan_for((self.budget.tokens,))

    def __call__(self, model: PreTrainedModel) -> RetrievalRun:
        """A context manager; its value is the run.

        Raises:
            UnsupportedModel: the model has something that the press would get wrong, with the reason.
        """
        return RetrievalRun(self, model)

    def plan_for(self, budgets: tuple[int, ...]) -> ReadPlan:
        """What each row may read, with so many slots a row.

        Raises:
            ValueError: a budget that does not hold sinks, window and one slot more.
        """
        smallest, least = min(budgets), self.least_budget
        if smallest < least:
            raise ValueError(
                f"`budget` must hold {self.num_sinks} sinks, {self._recent_of(least)} recent tokens and one that is "
                f"retrieved: at least {least} slots, got {smallest}; raise `budget` or lower `num_sinks` or `num_recent`"
            )
        return ReadPlan(budgets, self.num_sinks, self._recent_of(smallest))

    @property
    def least_budget(self) -> int:
        """The fewest slots that hold sinks, window and one slot more."""
        if self.num_recent is not None:
            return self.num_sinks + self.num_recent + 1
        sizes = itertools.count(self.num_sinks + 2)
        return next(size for size in sizes if size > self.num_sinks + self._recent_of(size))

    def _recent_of(self, budget: int) -> int:
        return self.num_recent or max(1, min(_MOST_RECENT, budget // 4))

    def plan(self, seen_tokens: Tensor, bytes_per_slot: int) -> ReadPlan:
        """What each row may read, with `[B]` tokens so far.

        Raises:
            ValueError: a budget in bytes that buys too few slots.
        """
        slots = self.budget.slots(seen_tokens.cpu(), bytes_per_slot, self.least_budget)
        return self.plan_for(tuple(slots.tolist()))
