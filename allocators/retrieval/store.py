"""What an index holds of its regions: where their members lie, and the vectors that stand for them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from kvstitch.allocators.retrieval.layout import Layout

# Room for regions that open while the model decodes; grown in strides, so that hardly a step copies anything, and in small
# ones, because room is memory: a region opens every 16 tokens, so that these serve 256.
_LEAST_GROWTH = 16


class RegionStore:
    """Ranges and representatives of the regions of one layer, one column a region.

    On a CPU representatives are stored dimension by dimension: scoring them is then one product of a row with a matrix
    that is read front to back, four times as fast as with rows of D. A GPU does not care, and its kernels want rows; so
    does whoever scores only some (`by_row`).

    Attributes: views of the columns in use, C = `num`.
        starts, sizes: `[B, U, C]` int32, the range in which the members lie.
        counts: `[B, U, C]` int32, all members that may be read: `sizes`, and those that are listed elsewhere; the same
            tensor as `sizes` if none ever is.
        bias: `[B, U, C]` 0, or -inf where there is no member.
        vectors: `[B, U, E, C]` representatives, E = D for centroids, 2 D for bounds (largest, smallest); float32, or the
            dtype of a cache of half precision.
        values: `[B, U, C, D]` mean values in the dtype of the values, or None.
    """

    starts: Tensor
    sizes: Tensor
    counts: Tensor
    bias: Tensor
    vectors: Tensor
    values: Tensor | None

    def __init__(
        self,
        layout: Layout,
        rows: Float[Tensor, "B U C E"],
        values: Float[Tensor, "B U C D"] | None = None,
        has_listed: bool = False,
        by_row: bool = False,
    ):
        self.num = layout.starts.shape[-1]
        bias = torch.zeros(layout.sizes.shape, device=layout.sizes.device).masked_fill_(layout.sizes == 0, -torch.inf)
        self._tensors = {"starts": layout.starts.int(), "sizes": layout.sizes.int(), "bias": bias}
        if has_listed:
            self._tensors["counts"] = layout.sizes.int()
        self._by_dimension = rows.device.type == "cpu" and not by_row
        self._tensors["vectors"] = rows.transpose(2, 3).contiguous() if self._by_dimension else rows.contiguous()
        if values is not None:
            self._tensors["values"] = values
        self._refresh()

    @property
    def capacity(self) -> int:
        """Columns that there is room for."""
        return self._tensors["starts"].shape[-1]

    @property
    def has_values(self) -> bool:
        return self.values is not None

    @property
    def vector_rows(self) -> Float[Tensor, "B U C E"]:
        """Representatives of all columns that there is room for, zero in those that were never used."""
        vectors = self._tensors["vectors"]
        return vectors.transpose(2, 3) if self._by_dimension else vectors

    def open(self) -> None:
        """Makes an empty column at the end."""
        self.num += 1
        if self.num > self.capacity:
            extra = max(_LEAST_GROWTH, self.capacity // 64)
            by_row = ("values",) if self._by_dimension else ("values", "vectors")
            for name, tensor in self._tensors.items():
                padding = (0, 0, 0, extra) if name in by_row else (0, extra)
                self._tensors[name] = torch.nn.functional.pad(
                    tensor, padding, value=-torch.inf if name == "bias" else 0
                )
        self._refresh()

    def score(self, rows: Float32[Tensor, "B U N E"]) -> Float32[Tensor, "B U N C"]:
        """Product in float32 of each row with each representative; -inf for columns without members."""
        batch, units, count, _ = rows.shape
        return torch.baddbmm(self._flat_bias, rows.flatten(0, 1), self._flat_vectors.float()).view(
            batch, units, count, self.num
        )

    def add_to_last(self, count: "int | Tensor") -> None:
        """The last column has `count` members more in its range."""
        self._last_size += count
        if self._last_count is not self._last_size:
            self._last_count += count

    def average_last(self, key: Tensor, value: Tensor | None, weight: "float | Tensor") -> None:
        """Moves the means of the last column towards `[B, U, D]` vectors by `weight`."""
        means = (
            [(self._last_vector, key)] if value is None else [(self._last_vector, key), (self.values[:, :, -1], value)]
        )
        for mean, new in means:
            mean.copy_(torch.lerp(mean.float(), new, weight))

    def widen_last(self, key: Tensor, weight: "float | Tensor") -> None:
        """Extends the bounds of the last column; weight 1 sets them, 0 leaves them."""
        bounds = self._last_vector
        dim = key.shape[-1]
        upper, lower = torch.maximum(bounds[..., :dim], key), torch.minimum(bounds[..., dim:], key)
        weight = torch.as_tensor(weight, device=key.device)
        new = torch.where(weight == 1, torch.cat((key, key), dim=-1), torch.cat((upper, lower), dim=-1))
        bounds.copy_(torch.where(weight == 0, bounds, new))

    def vectors_at(self, columns: Int64[Tensor, "B U 1"]) -> Float32[Tensor, "B U E 1"]:
        return self.vectors.gather(-1, columns[:, :, None].expand(-1, -1, self.vectors.shape[2], -1))

    def average_at(self, columns: Int64[Tensor, "B U 1"], key: Tensor, value: Tensor | None, weight: Tensor) -> None:
        """Moves the means of one column a unit towards `[B, U, D]` vectors by `weight` `[B, U, 1]`."""
        index = columns[:, :, None].expand(-1, -1, self.vectors.shape[2], -1)
        mean = self.vectors.gather(-1, index)
        self.vectors.scatter_(-1, index, mean + (key[..., None] - mean) * weight[..., None])
        if value is not None:
            index = columns[..., None].expand(-1, -1, -1, value.shape[-1])
            mean = self.values.gather(2, index)
            moved = torch.lerp(mean.float(), value[:, :, None], weight[..., None])
            self.values.scatter_(2, index, moved.to(mean.dtype))

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._tensors = {name: function(tensor) for name, tensor in self._tensors.items()}
        self._refresh()

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def _refresh(self) -> None:
        """Views are made when columns come, not at every step."""
        used = slice(0, self.num)
        self.starts, self.sizes, self.bias = (self._tensors[name][..., used] for name in ("starts", "sizes", "bias"))
        self.counts = self._tensors["counts"][..., used] if "counts" in self._tensors else self.sizes
        self.vectors = self.vector_rows[:, :, used].transpose(2, 3)
        self.values = self._tensors["values"][:, :, used] if "values" in self._tensors else None
        self._flat_bias, self._flat_vectors = self.bias.flatten(0, 1)[:, None], self.vectors.flatten(0, 1)
        self._last_vector, self._last_size = self.vectors[..., -1], self.sizes[..., -1]
        self._last_count = self._last_size if self.counts is self.sizes else self.counts[..., -1]


def centroids(keys: Float[Tensor, "B H T D"], labels: Int64[Tensor, "B U T"], num: int) -> Float32[Tensor, "B U C D"]:
    """Mean of the members of each region, in float32; U = H, or Q where heads of a group have regions of their own."""
    batch, heads, length, dim = keys.shape
    units = labels.shape[1]
    group = units // heads
    # A column more takes what lies in no region.
    sums = torch.zeros(batch, heads, group, num + 1, dim, device=keys.device)
    counts = torch.zeros(batch, heads, group, num + 1, device=keys.device)
    by_group = (labels + 1).view(batch, heads, group, length)
    first_row = torch.arange(0, batch * heads * (num + 1), num + 1, device=keys.device).view(batch, heads, 1)
    rows = keys.reshape(-1, dim).float()
    for member in range(group):
        index = (by_group[:, :, member] + first_row).flatten()
        flat = torch.zeros(batch * heads * (num + 1), dim, device=keys.device).index_add_(0, index, rows)
        sums[:, :, member] = flat.view(batch, heads, num + 1, dim)
        counts[:, :, member].scatter_add_(
            -1, by_group[:, :, member], torch.ones_like(by_group[:, :, member], dtype=torch.float32)
        )
    means = sums[..., 1:, :] / counts[..., 1:, None].clamp(min=1)
    return means.view(batch, units, num, dim)


def bounds_of(keys: Float[Tensor, "B H T D"], labels: Int64[Tensor, "B H T"], num: int) -> Float32[Tensor, "B H C E"]:
    """Largest and smallest value of each dimension over the members of each region (E = 2 D); 0 without members."""
    batch, heads, _, dim = keys.shape
    index = (labels + 1)[..., None].expand(-1, -1, -1, dim)
    upper = torch.zeros(batch, heads, num + 1, dim, device=keys.device)
    lower = torch.zeros_like(upper)
    upper.scatter_reduce_(2, index, keys.float(), "amax", include_self=False)
    lower.scatter_reduce_(2, index, keys.float(), "amin", include_self=False)
    return torch.cat((upper, lower), dim=-1)[:, :, 1:]
