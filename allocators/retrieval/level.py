"""One level of a tree over regions: nodes, the vectors that stand for them, and where their children are."""

from collections.abc import Callable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

# Room for nodes that come later; grown in strides.
_LEAST_GROWTH = 16


class Level:
    """Nodes of one level; the children of a node are neighbours on the next finer one.

    Args:
        rows: `[B, U, P, E]` mean of the representatives of a node's tokens.
        tokens: `[B, U, P]` int64; 0 where there is no node.
        first: `[B, U, P]` its first child.
        count: `[B, U, P]` its children.

    Attributes: of the nodes in use, `num` of them; of those the first `parented` have a parent, the top's as if it had one.
    """

    def __init__(
        self,
        rows: Float32[Tensor, "B U P E"],
        tokens: Int64[Tensor, "B U P"],
        first: Int64[Tensor, "B U P"],
        count: Int64[Tensor, "B U P"],
    ):
        self.num = self.parented = tokens.shape[-1]
        bias = torch.zeros(tokens.shape, device=tokens.device).masked_fill_(tokens == 0, -torch.inf)
        self._tensors = {"rows": rows, "tokens": tokens, "first": first, "count": count, "bias": bias}
        self._refresh()

    @classmethod
    def above(cls, rows: Tensor, tokens: Tensor, parent: Int64[Tensor, "B U C"], num: int) -> "Level":
        """The `num` parents of the given regions or nodes, which are sorted by them; those without (-1) come last."""
        index = torch.where(parent < 0, num, parent)
        shape = (*parent.shape[:2], num + 1)
        count = parent.new_zeros(shape).scatter_add_(-1, index, torch.ones_like(index))[..., :num]
        held = parent.new_zeros(shape).scatter_add_(-1, index, tokens)[..., :num]
        sums = rows.new_zeros(*shape, rows.shape[-1])
        sums.scatter_add_(2, index[..., None].expand_as(rows), rows * tokens[..., None])
        return cls(sums[:, :, :num] / held.clamp(min=1)[..., None], held, count.cumsum(-1) - count, count)

    def append(self, rows: Float32[Tensor, "B U N E"], tokens: Int64[Tensor, "B U N"], first: int) -> None:
        """One more node, above the N children from `first` on."""
        if self.num == self._tensors["tokens"].shape[-1]:
            extra = max(_LEAST_GROWTH, self.num // 4)
            for name, tensor in self._tensors.items():
                padding = (0, 0, 0, extra) if name == "rows" else (0, extra)
                self._tensors[name] = torch.nn.functional.pad(tensor, padding)
        self.num += 1
        self._refresh()
        held = tokens.sum(dim=-1)
        self.rows[:, :, -1] = (rows * tokens[..., None]).sum(dim=2) / held.clamp(min=1)[..., None]
        self.tokens[..., -1], self.first[..., -1], self.count[..., -1] = held, first, tokens.shape[-1]
        self.bias[..., -1].masked_fill_(held == 0, -torch.inf)

    def parents_of(self, child: Int64[Tensor, "B U T"]) -> Int64[Tensor, "B U T"]:
        """The node above each child; -1 where there is none."""
        at = torch.searchsorted((self.first + self.count).contiguous(), child.contiguous(), right=True)
        inside = at.clamp(max=self.num - 1)
        return torch.where((child >= 0) & (at == inside) & (child >= self.first.gather(-1, inside)), inside, -1)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._tensors = {name: function(tensor) for name, tensor in self._tensors.items()}
        self._refresh()

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def _refresh(self) -> None:
        used = slice(0, self.num)
        self.rows = self._tensors["rows"][:, :, used]
        self.tokens, self.bias, self.first, self.count = (
            self._tensors[name][..., used] for name in ("tokens", "bias", "first", "count")
        )
