"""What a kvpress `score` is called with: a row's valid tokens, and stand-ins for hidden states and module."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from kvstitch.views import LayerView, QueryWindow


@dataclass(frozen=True)
class Part:
    """Some kv heads of one row, which hold equally many tokens.

    Args:
        slots: `[H2, N]` the valid slots of each of the heads.
    """

    view: LayerView
    row: int
    heads: slice
    slots: Int64[Tensor, "H2 N"]

    def take(self, x: Tensor) -> Float32[Tensor, "1 H2 N D"]:
        """Keys or values of the part, holes closed."""
        index = self.slots[None, :, :, None].expand(-1, -1, -1, x.shape[-1])
        return x[self.row : self.row + 1, self.heads].float().gather(2, index)

    def queries(self, count: int) -> QueryWindow:
        """Those of the newest `count` queries that exist, of the query heads that read the part, float32."""
        window = self.view.queries.last(count)
        by_kv_head = window.rotated[self.row].float().unflatten(0, (self.view.keys.shape[1], -1))
        exists = window.valid[self.row]
        rotated = by_kv_head[self.heads].flatten(0, 1)[:, exists]
        return QueryWindow(rotated[None], window.positions[self.row, exists][None])


@dataclass(frozen=True)
class Call:
    """Arguments of a kvpress `score` besides keys and values, and the press to call."""

    press: object
    module: SimpleNamespace
    hidden: object
    kwargs: dict = field(default_factory=dict)


def parts_of(view: LayerView) -> Iterator[Part]:
    """All heads of a row at once if they hold equally many tokens, else head by head; parts without tokens are left out.

    One host synchronisation a row.
    """
    for row, valid in enumerate(view.valid):
        counts = valid.sum(dim=-1).tolist()
        alike = len(set(counts)) == 1
        for heads in [slice(0, len(counts))] if alike else [slice(h, h + 1) for h in range(len(counts))]:
            if counts[heads.start] > 0:
                yield Part(view, row, heads, valid[heads].nonzero()[:, 1].view(heads.stop - heads.start, -1))


def call_with_nothing(press: object, part: Part) -> Call:
    """For presses that read keys and values only."""
    return Call(press, _module(part, len(part.slots)), _Absent(type(press).__name__))


def call_with_plain_keys(press: object, part: Part) -> Call:
    """For presses that project hidden states to keys before RoPE: the cached keys, turned back."""
    positions = part.view.positions[part.row, part.heads].gather(1, part.slots)
    plain = part.view.rotary.unrotate(part.take(part.view.keys).transpose(0, 1), positions).transpose(0, 1)
    return Call(press, _module(part, len(part.slots)), _as_states(plain))


def call_with_rotated_queries(press: object, part: Part, window_size: int) -> Call | None:
    """For presses that attend with a window of queries: these come rotated, and what would rotate them does nothing.

    Returns: None if there is no query, or no token besides the newest.
    """
    window = part.queries(window_size)
    size = min(window.positions.shape[1], part.slots.shape[1] - 1)
    if size < 1:
        return None
    if getattr(press, "window_size", size) > size:
        press = copy.copy(press)
        press.window_size = size
    # SnapKV asks for more states than its window holds; the one in front is never looked at.
    states = F.pad(_as_states(window.rotated * _scale(part.view)), (0, 0, 1, 0))
    module = _module(part, window.rotated.shape[1])
    still = states.new_ones(1, states.shape[1], module.head_dim)
    return Call(press, module, states, {"position_embeddings": (still, torch.zeros_like(still))})


def call_with_plain_queries(press: object, part: Part, window_size: int) -> Call | None:
    """For presses that fit queries before RoPE and turn them to future positions: the true ones.

    Returns: None if there is no query, or no token besides the press's sinks.
    Raises: NotImplementedError if the model's RoPE is not the one that kvpress builds.
    """
    view, sinks = part.view, press.n_sink
    window = part.queries(window_size)
    if window.positions.shape[1] == 0 or part.slots.shape[1] <= sinks:
        return None
    if view.rotary.interleaved or view.rotary.rotated_dims != view.keys.shape[-1]:
        raise NotImplementedError(
            f"{type(press).__name__} turns queries itself, over all dims and with dim f paired to f + D / 2, unlike this "
            "model; use kvstitch.scorers.ExpectedAttention"
        )
    # It drops the first n_sink queries it is given, so it is given as many to drop.
    states = F.pad(_as_states(window.unrotated(view.rotary) * _scale(view)), (0, 0, sinks, 0))
    module = _module(part, window.rotated.shape[1])
    # It takes the number of its states for the next position.
    shift = view.next_position[part.row] - states.shape[1]
    module.rotary_emb = lambda like, position_ids: _cos_sin(view, position_ids + shift)
    return Call(press, module, states)


class _Module(SimpleNamespace):
    """The little of an attention module that scorer presses look at."""

    def __getattr__(self, name: str):
        raise AttributeError(f"KVPressScorer's stand-in for the attention module has no {name!r}")


class _Absent:
    """Hidden states that are not kept: whoever looks at them is told so."""

    def __init__(self, press_name: str):
        self._press_name = press_name

    def __getattr__(self, name: str):
        raise NotImplementedError(
            f"{self._press_name} reads hidden states, which scorers never see; write it as a kvstitch Scorer"
        )

    def __getitem__(self, key: object):
        return self.__getattr__("__getitem__")


def _module(part: Part, num_query_heads: int) -> _Module:
    # The hidden states given are the projections themselves, so the projections of the stand-in do nothing.
    return _Module(
        config=SimpleNamespace(num_attention_heads=num_query_heads, num_key_value_heads=len(part.slots)),
        head_dim=part.view.keys.shape[-1],
        layer_idx=part.view.layer_idx,
        q_proj=lambda states: states,
        k_proj=lambda states: states,
    )


def _scale(view: LayerView) -> float:
    """Factor on queries that makes kvpress's 1 / sqrt(D) the model's scaling."""
    return view.scaling * math.sqrt(view.keys.shape[-1])


def _as_states(x: Float32[Tensor, "1 Q W D"]) -> Float32[Tensor, "1 W QD"]:
    """Vectors of heads as the output of a projection."""
    return x.transpose(1, 2).flatten(2)


def _cos_sin(view: LayerView, positions: Int64[Tensor, "1 N"]) -> tuple[Tensor, Tensor]:
    frequencies = view.rotary.inverse_frequencies.to(positions.device, torch.float64)
    phase = (positions[..., None].double() * frequencies).repeat(1, 1, 2)
    scaling = view.rotary.attention_scaling
    return (phase.cos() * scaling).float(), (phase.sin() * scaling).float()
