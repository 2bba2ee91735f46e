"""Layers of known history: what a row has seen before RoPE, and the views that a press would make of it."""

from dataclasses import dataclass

import pytest
import torch

from kvstitch.views import LayerView, QueryStatistics, QueryWindow, Rotary

BASE = 100.0


@dataclass
class Story:
    """Everything one layer has seen, row by row, before RoPE; float64. Tokens of a row stand at positions 0, 1, ...

    `kept[b, h, p]` says which tokens head h of row b still holds.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: list[int]
    kept: torch.Tensor
    rotary: Rotary
    scaling: float

    def turned(self, x: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """RoPE of `[..., L, D]` at positions shift, shift + 1, ... by definition, float64."""
        rotary, out = self.rotary, x.clone()
        places = torch.arange(shift, shift + x.shape[-2], dtype=torch.float64)
        count = len(rotary.inverse_frequencies)
        for f in range(count):
            first, second = (2 * f, 2 * f + 1) if rotary.interleaved else (f, f + count)
            angle = places * rotary.inverse_frequencies[f]
            cos, sin = angle.cos() * rotary.attention_scaling, angle.sin() * rotary.attention_scaling
            out[..., first] = x[..., first] * cos - x[..., second] * sin
            out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def rows(self, *chosen: int) -> "Story":
        """The story of some rows alone."""
        index = list(chosen)
        return Story(
            self.queries[index],
            self.keys[index],
            self.values[index],
            [self.lengths[row] for row in index],
            self.kept[index],
            self.rotary,
            self.scaling,
        )

    def permuted(self, heads: list[int]) -> "Story":
        """The same layer with its kv heads in another order, each with its query heads."""
        batch, count = self.keys.shape[:2]
        queries = self.queries.unflatten(1, (count, -1))[:, heads].flatten(1, 2)
        return Story(
            queries,
            self.keys[:, heads],
            self.values[:, heads],
            self.lengths,
            self.kept[:, heads],
            self.rotary,
            self.scaling,
        )

    def view(
        self, window: int = 16, compact: bool = True, empty: float = float("nan"), dtype: torch.dtype = torch.float32
    ) -> LayerView:
        """The view of a press. `compact`: kept tokens moved together, empty slots last; else every token in its slot,
        rows padded on the left and evicted tokens empty. Empty slots hold `empty`."""
        batch, heads, longest, dims = self.keys.shape
        turned = self.turned(self.keys)
        slots = int(self.kept.sum(-1).max()) if compact else longest
        keys = torch.full((batch, heads, slots, dims), empty, dtype=torch.float64)
        values = keys.clone()
        positions = torch.full((batch, heads, slots), -1)
        for b in range(batch):
            for h in range(heads):
                places = self.kept[b, h].nonzero()[:, 0]
                targets = torch.arange(len(places)) if compact else places + longest - self.lengths[b]
                keys[b, h, targets] = turned[b, h, places]
                values[b, h, targets] = self.values[b, h, places]
                positions[b, h, targets] = places
        return LayerView(
            keys=keys.to(dtype),
            values=values.to(dtype),
            positions=positions,
            valid=positions >= 0,
            scaling=self.scaling,
            next_position=torch.tensor(self.lengths),
            layer_idx=3,
            num_layers=8,
            queries=self._window(window, dtype),
            statistics=self.statistics(),
            rotary=self.rotary,
        )

    def _window(self, window: int, dtype: torch.dtype) -> QueryWindow:
        batch, count, _, dims = self.queries.shape
        turned = self.turned(self.queries)
        rotated = torch.full((batch, count, window, dims), float("nan"), dtype=torch.float64)
        positions = torch.full((batch, window), -1)
        for b, length in enumerate(self.lengths):
            held = min(window, length)
            rotated[b, :, window - held :] = turned[b, :, length - held : length]
            positions[b, window - held :] = torch.arange(length - held, length)
        return QueryWindow(rotated.to(dtype), positions)

    def statistics(self) -> QueryStatistics:
        """Sums over all queries of a row but its first four."""
        planes = self.complex(self.queries)
        seen = torch.zeros(planes.shape[0], 1, planes.shape[2], 1)
        for b, length in enumerate(self.lengths):
            seen[b, :, 4:length] = 1
        planes = planes * seen
        return QueryStatistics(
            count=seen.sum(dim=(1, 2, 3)).long(),
            total=planes.sum(dim=2).to(torch.complex64),
            modulus=planes.abs().sum(dim=2).float(),
            square=planes.abs().square().sum(dim=2).float(),
        )

    def complex(self, x: torch.Tensor) -> torch.Tensor:
        """Complex planes of all dims, float64: of the rotated ones, then of the others, first half with second half."""
        count = len(self.rotary.inverse_frequencies)
        middle = count + x.shape[-1] // 2
        rest = torch.complex(x[..., 2 * count : middle], x[..., middle:])
        if self.rotary.interleaved:
            return torch.cat((torch.complex(x[..., 0 : 2 * count : 2], x[..., 1 : 2 * count : 2]), rest), dim=-1)
        return torch.cat((torch.complex(x[..., :count], x[..., count : 2 * count]), rest), dim=-1)

    def of_planes(self, turning: torch.Tensor | float, still: float) -> torch.Tensor:
        """`[D / 2]`: a number for each rotated plane, another for the others."""
        factors = torch.full((self.keys.shape[-1] // 2,), still, dtype=torch.float64)
        factors[: len(self.rotary.inverse_frequencies)] = turning
        return factors

    def kept_places(self, b: int, h: int) -> list[int]:
        return self.kept[b, h].nonzero()[:, 0].tolist()


@pytest.fixture
def make_story():
    """`make_story(lengths=(29,), keep=1.0, ...)`: a random `Story`; the last four tokens are always kept."""

    def make(
        lengths=(29,),
        keep=0.6,
        num_kv_heads=2,
        group=3,
        dims=8,
        rotated_dims=None,
        interleaved=False,
        attention_scaling=1.0,
        alike=False,
        seed=0,
    ) -> Story:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        longest, batch = max(lengths), len(lengths)
        count = (rotated_dims or dims) // 2
        frequencies = BASE ** (-torch.arange(count, dtype=torch.float64) / count)
        kept = torch.rand(batch, num_kv_heads, longest, generator=generator) < keep
        if alike:
            kept = kept[:, :1].expand(-1, num_kv_heads, -1).clone()
        for b, length in enumerate(lengths):
            kept[b, :, max(0, length - 4) : length] = True
            kept[b, :, length:] = False
        # A mean that is not zero, as real queries and keys have.
        return Story(
            queries=normal(batch, num_kv_heads * group, longest, dims) + normal(batch, num_kv_heads * group, 1, dims),
            keys=normal(batch, num_kv_heads, longest, dims) + normal(batch, num_kv_heads, 1, dims),
            values=normal(batch, num_kv_heads, longest, dims),
            lengths=list(lengths),
            kept=kept,
            rotary=Rotary(frequencies, attention_scaling, interleaved),
            scaling=0.41,
        )

    return make


@pytest.fixture
def make_view():
    """`make_view(keys, ...)`: a view of one row and one kv head from nested lists, for cases done by hand."""

    def make(keys, queries=(), query_positions=(), values=None, rotary=None, statistics=None, scaling=1.0):
        slots, window = len(keys), len(query_positions)
        return LayerView(
            keys=torch.tensor(keys).float()[None, None],
            values=torch.tensor(keys if values is None else values).float()[None, None],
            positions=torch.arange(slots)[None, None],
            valid=torch.ones(1, 1, slots, dtype=torch.bool),
            scaling=scaling,
            next_position=torch.tensor([slots]),
            layer_idx=0,
            num_layers=1,
            queries=QueryWindow(torch.tensor(queries).float()[None], torch.tensor(query_positions)[None])
            if window
            else None,
            statistics=statistics,
            rotary=rotary,
        )

    return make


@pytest.fixture
def assert_scores():
    """`assert_scores(scores, story, view, reference)`: `reference(b, h)` gives the scores of the kept tokens in order."""

    def check(scores, story, view, reference, atol=2e-6):
        for b in range(len(story.lengths)):
            for h in range(story.keys.shape[1]):
                expected = torch.as_tensor(reference(b, h), dtype=torch.float64)
                actual = scores[b, h][view.valid[b, h]].double()
                torch.testing.assert_close(actual, expected, rtol=2e-4, atol=atol)

    return check
