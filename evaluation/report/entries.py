"""One method at one budget: what its runs of all seeds give together."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvstitch.evaluation.report.runs import Run
from kvstitch.evaluation.summary import asks_nothing, perplexity, summarise


@dataclass(frozen=True)
class Value:
    """A metric over all samples of all seeds.

    Args:
        mean: over the samples.
        std: standard deviation over the samples.
        seeds_std: standard deviation over the means of the seeds; None with one seed.
        n: samples.
        seeds: runs that differ in nothing but the seed.
    """

    mean: float
    std: float | None
    seeds_std: float | None
    n: int
    seeds: int

    @property
    def error(self) -> float | None:
        """Standard error of the mean over the samples."""
        return None if self.std is None else self.std / self.n**0.5


@dataclass(frozen=True)
class Entry:
    """One method at one budget: the runs that differ in nothing but the seed.

    Args:
        method: press, scorer and allocator, and what else sets it apart from the others of its section.
        budget: as it was written, e.g. "256 tokens"; "" for the dense model.
        budget_value: as a number; None for the dense model.
        runs: by seed.
        repeats: runs of further seeds that computed what one of `runs` did, since neither task nor answers are drawn; they
            count in nothing. Each with the run that it repeats.
    """

    method: str
    budget: str
    budget_value: float | None
    runs: tuple[Run, ...]
    repeats: tuple[tuple[Run, Run], ...] = ()

    @property
    def compared_tokens(self) -> dict[tuple[str, str], int]:
        """Of each seed and sample over how many tokens its means are, as far as it was recorded. All such tokens end with the
        trace, so that as many are the same ones."""
        return {
            (run.seeds, record["id"]): count
            for run in self.runs
            for record in run.records
            if "error" not in record and (count := record["metrics"].get("compared_tokens")) is not None
        }

    @property
    def bound(self) -> tuple[int, int] | None:
        """Samples in which the budget bound, and all that were measured; None for the dense model."""
        events = [
            record["metrics"].get("events") for run in self.runs for record in run.records if "error" not in record
        ]
        known = [count > 0 for count in events if count is not None]
        return (sum(known), len(known)) if known else None

    @property
    def never_bound(self) -> bool:
        """Whether nothing was evicted or left unread in any sample, so that the figures are the dense model's."""
        return self.bound is not None and not self.bound[0]

    def value(self, metric: str) -> Value | None:
        """A metric of this entry; None if no sample has it."""
        if metric.endswith("perplexity"):
            return self._perplexity(metric.replace("perplexity", "nll"))
        each = [[record["metrics"].get(metric) for record in run.records if "error" not in record] for run in self.runs]
        whole = summarise(number for numbers in each for number in numbers)
        if whole["mean"] is None:
            return None
        means = [mean for mean in (summarise(numbers)["mean"] for numbers in each) if mean is not None]
        spread = statistics.stdev(means) if len(means) > 1 else None
        return Value(whole["mean"], whole["std"], spread, whole["n"], len(means))

    def _perplexity(self, metric: str) -> Value | None:
        nll = self.value(metric) if all(asks_nothing(run.records) for run in self.runs) else None
        if nll is None:
            return None
        found = perplexity({name: value for name, value in asdict(nll).items() if name != "seeds"})
        return None if found["mean"] is None else Value(**found, seeds=nll.seeds)


def share_tokens(one: Entry, other: Entry) -> bool:
    """Whether their means over tokens are over the same ones."""
    mine, its = one.compared_tokens, other.compared_tokens
    shared = mine.keys() & its.keys()
    if shared:
        return all(mine[key] == its[key] for key in shared)
    # Without a sample in common, as of other seeds, the kind of press tells: retrieval has no interval.
    return one.runs[0].labels.get("interval") == other.runs[0].labels.get("interval")


def which_tokens(group: Sequence[Entry]) -> str:
    """`last 63 tokens of each trace`, of entries that share them."""
    counts = sorted({count for entry in group for count in entry.compared_tokens.values()})
    if not counts:
        return "tokens not recorded"
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"last {many} tokens of each trace"
