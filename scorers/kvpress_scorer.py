"""Any scorer press of kvpress, on the tokens that are really there and with queries at their own positions."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from kvstitch.scorers import kvpress_inputs as inputs
from kvstitch.scorers.base import Scorer
from kvstitch.scorers.kvpress_recipes import Recipe, recipe_for
from kvstitch.scorers.masking import LOWEST
from kvstitch.scorers.options import check_count
from kvstitch.views import LayerView, Needs


@dataclass(frozen=True)
class KVPressScorer(Scorer):
    """The `score` of a kvpress `ScorerPress` (github.com/NVIDIA/kvpress, 0.5), used as a scorer.

    Works: KnormPress, KeyDiffPress, LagKVPress, CURPress, RandomPress, LeverageScorePress, TOVAPress, SnapKVPress,
    PyramidKVPress (its scores; budgets by layer belong to an allocator), ExpectedAttentionPress, CapPress, QFilterPress
    once its filters are loaded, and other presses that read keys and values only. `kvpress_recipes` says which are
    refused, and why.

    The positions at which kvpress scores are wrong while decoding, and these are not: it rotates every query of the
    window to the newest position (TOVA, SnapKV, PyramidKV; here queries come as attention received them), and it starts
    the future of ExpectedAttention and Cap at the length of its query buffer (here at the next true position). It scores
    padding and needs more tokens than the window; here each row is scored alone on its valid slots, heads that hold
    different numbers of tokens apart, and the window shrinks to what there is. What stays: SnapKV and TOVA take the last
    slots to be the window's own tokens (true if the allocator protects that many), LagKV cuts its partitions by slot,
    and the guards that a press writes over sinks or window are part of its scores.

    One host synchronisation a row, and a Python loop over rows: for comparisons, not for speed.

    Args:
        press: a kvpress `ScorerPress`; its `compression_ratio` is not used.
        window_size: queries given to presses that fit a distribution (ExpectedAttention, Cap).
        seed: for presses that draw from torch's global generator, which is left as it was.

    Raises: ImportError without kvpress; TypeError for anything but a `ScorerPress`; NotImplementedError for a press that
        needs what no view holds.
    """

    press: object
    window_size: int = 256
    seed: int = 0

    def __post_init__(self):
        check_count("window_size", self.window_size, 1)
        check_count("seed", self.seed, 0)
        try:
            from kvpress import ScorerPress
        except ImportError as error:
            raise ImportError(f"KVPressScorer needs kvpress: pip install -e '.[kvpress]' ({error})") from error
        if not isinstance(self.press, ScorerPress):
            raise TypeError(
                f"press must be an instance of a kvpress ScorerPress, such as KnormPress(), got {self.press!r}; presses "
                "that wrap others or choose budgets are allocators here"
            )
        recipe_for(self.press)

    @property
    def needs(self) -> Needs:
        recipe = recipe_for(self.press)
        turns = recipe.hidden in ("plain_keys", "plain_queries")
        return Needs(queries=self._window_of(recipe), rotary=turns)

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        """What the press says, in float32; NaN becomes the lowest number. 0 where it has nothing to rank."""
        recipe = recipe_for(self.press)
        scores = torch.zeros(view.keys.shape[:3], device=view.keys.device)
        for part in inputs.parts_of(view):
            call = self._call(recipe, part)
            if call is None:
                continue
            with _generator(self.seed + view.layer_idx, view.keys.device) if recipe.draws else nullcontext():
                result = call.press.score(
                    call.module, call.hidden, part.take(view.keys), part.take(view.values), None, call.kwargs
                )
            if result.shape != (1, *part.slots.shape):
                raise ValueError(
                    f"{type(self.press).__name__} returned {list(result.shape)}, expected {[1, *part.slots.shape]}"
                )
            ranked = torch.nan_to_num(result[0].detach().float(), nan=LOWEST)
            scores[part.row, part.heads].scatter_(1, part.slots, ranked)
        return scores

    def _call(self, recipe: Recipe, part: inputs.Part) -> inputs.Call | None:
        window = self._window_of(recipe)
        if recipe.hidden == "rotated_queries":
            return inputs.call_with_rotated_queries(self.press, part, window)
        if recipe.hidden == "plain_queries":
            return inputs.call_with_plain_queries(self.press, part, window)
        if recipe.hidden == "plain_keys":
            return inputs.call_with_plain_keys(self.press, part)
        return inputs.call_with_nothing(self.press, part)

    def _window_of(self, recipe: Recipe) -> int:
        if recipe.hidden == "plain_queries":
            return self.window_size
        return recipe.window if isinstance(recipe.window, int) else getattr(self.press, recipe.window)


@contextmanager
def _generator(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's global generator seeded, and put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
