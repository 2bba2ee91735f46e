"""Quest: pages of neighbouring tokens, rated by the bounds of their keys (arXiv 2406.10774)."""

from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor

from kvstitch.allocators.options import check_choices, check_counts
from kvstitch.allocators.retrieval.base import LayerFrame, LayerIndex, RetrievingAllocator
from kvstitch.allocators.retrieval.growth import ChunkGrowth
from kvstitch.allocators.retrieval.reading import Parts
from kvstitch.allocators.retrieval.region_index import RegionIndex, RegionOptions
from kvstitch.allocators.retrieval.scoring import COMBINATIONS, SELECTIONS
from kvstitch.views import LayerView


class PageIndex(RegionIndex):
    """Regions are pages of `page_size` tokens in the order of positions."""

    def __init__(self, frame: LayerFrame, options: RegionOptions, page_size: int):
        super().__init__(frame, options, ChunkGrowth(page_size, bounds=options.bounds))
        self._page_size = page_size

    def partition(self, view: LayerView, parts: Parts) -> Int64[Tensor, "B H T"]:
        # Positions may have gaps where padding lay; pages do not care.
        first = view.positions.masked_fill(~parts.body, 2**62).amin(dim=-1, keepdim=True)
        return (view.positions - first).clamp(min=0) // self._page_size


@dataclass(frozen=True, kw_only=True)
class PageRetrieval(RetrievingAllocator):
    """Reads the pages whose keys could have the largest q.k (Quest, arXiv 2406.10774).

    Sinks and window are no part of pages, are read always, and count inside the budget, as for every method here; of
    the last page that does not fit the newest tokens are read. Quest itself reads whole pages and leaves two layers
    dense (`dense_layers` of the press).

    Args:
        page_size: tokens per page.
        representative: "bounds" of each dimension (Quest), or the "mean" key.
        select: one selection per "query_head" (Quest), or per "kv_head".
        combine: of the query heads that select together, see `CommunityRetrieval`.
    """

    page_size: int = 16  # Quest
    representative: str = "bounds"  # Quest
    select: str = "query_head"  # Quest
    combine: str = "max"

    def __post_init__(self):
        check_counts(self, {"page_size": 1})
        check_choices(self, {"representative": ("bounds", "mean"), "select": SELECTIONS, "combine": COMBINATIONS})

    def start(self, frame: LayerFrame) -> LayerIndex:
        options = RegionOptions(combine=self.combine, select=self.select, bounds=self.representative == "bounds")
        return PageIndex(frame, options, self.page_size)
