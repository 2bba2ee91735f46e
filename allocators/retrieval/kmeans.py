"""k-means on keys, as Multipole attention clusters them, deterministic."""

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from kvstitch.kernels.common.ordering import TILE

# Scores that are held at once, in a buffer that is used again: few enough for the last-level cache.
_BLOCK_NUMBERS, _LEAST_ROWS = 2**20, 64


def kmeans(keys: Float[Tensor, "N D"], count: int, steps: int, seed: int) -> Int64[Tensor, "N"]:
    """Clusters of the keys by Euclidean distance (Lloyd), from `count` of the keys drawn at random.

    Args:
        keys: any dtype; distances are float32.
        count: clusters, at most N; some may end empty.
        steps: Lloyd iterations; the labels returned belong to the last centroids.
        seed: of the draw.

    Returns: labels in [0, count).
    """
    keys = keys.float()
    count = min(count, keys.shape[0])
    if count == 0:
        return keys.new_zeros(0, dtype=torch.int64)
    drawn = torch.randperm(keys.shape[0], generator=torch.Generator().manual_seed(seed))[:count]
    return _lloyd(keys, keys[drawn.sort().values.to(keys.device)], steps)


def refined(keys: Float[Tensor, "N D"], labels: Int64[Tensor, "N"], steps: int, seed: int) -> Int64[Tensor, "N"]:
    """Clusters of the keys by Lloyd steps that start from one member of each given cluster.

    Members are drawn: means of clusters that were not made of keys lie close together, and Lloyd parts them slowly.

    Returns: labels, of which no more exist than before; the given ones for 0 steps.
    """
    if steps == 0 or labels.numel() == 0:
        return labels
    keys = keys.float()
    order = torch.randperm(labels.numel(), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    first = torch.full((int(labels.max()) + 1,), labels.numel(), dtype=torch.int64, device=labels.device)
    place = torch.arange(labels.numel(), device=labels.device)
    first.scatter_reduce_(0, labels[order], place, "amin")
    return _lloyd(keys, keys[order[first[first < labels.numel()]]], steps)


def _lloyd(keys: Float32[Tensor, "N D"], means: Float32[Tensor, "C D"], steps: int) -> Int64[Tensor, "N"]:
    labels = _nearest(keys, means)
    for _ in range(steps):
        means = _means(keys, labels, means)
        labels = _nearest(keys, means)
    return labels


def _nearest(keys: Tensor, means: Tensor) -> Tensor:
    """Index of the nearest mean of each key, the lowest of equal ones.

    `argmax` over a row of scores takes as long as the product that makes them. The largest of each tile is found at the
    speed of memory, and `argmax` then looks at one number a tile and at one tile.
    """
    # |k - m|^2 is smallest where k.m - |m|^2 / 2 is largest.
    count, tiles = means.shape[0], -(-means.shape[0] // TILE)
    padded = means.new_zeros(tiles * TILE, means.shape[1])
    padded[:count] = means
    offsets = means.new_full((tiles * TILE,), -torch.inf)
    offsets[:count] = means.square().sum(dim=1) / -2
    labels = torch.empty(keys.shape[0], dtype=torch.int64, device=keys.device)
    rows = min(keys.shape[0], max(_LEAST_ROWS, _BLOCK_NUMBERS // (tiles * TILE)))
    scores, first = keys.new_empty(rows, tiles * TILE), torch.arange(rows, device=keys.device) * tiles
    for part, found in zip(keys.split(rows), labels.split(rows)):
        block = torch.addmm(offsets, part, padded.T, out=scores[: len(part)])
        tile = block.view(len(part), tiles, TILE).amax(dim=-1).argmax(dim=-1)
        inside = block.view(-1, TILE).index_select(0, tile + first[: len(part)]).argmax(dim=-1)
        torch.add(inside, tile, alpha=TILE, out=found)
    return labels


def _means(keys: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    """Mean key of each cluster; an empty one stays where it was."""
    sums = torch.zeros_like(old).index_add_(0, labels, keys)
    counts = torch.bincount(labels, minlength=old.shape[0])[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), old)
