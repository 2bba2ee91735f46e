"""k-means on keys, as Multipole attention clusters them, deterministic."""

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor


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


def refined(keys: Float[Tensor, "N D"], labels: Int64[Tensor, "N"], steps: int) -> Int64[Tensor, "N"]:
    """Labels after Lloyd steps that start from the centroids of given clusters, of which there are no more afterwards."""
    keys = keys.float()
    count = int(labels.max()) + 1 if labels.numel() else 0
    if steps == 0 or count == 0:
        return labels
    return _lloyd(keys, _means(keys, labels, keys.new_zeros(count, keys.shape[1])), steps - 1)


def _lloyd(keys: Float32[Tensor, "N D"], means: Float32[Tensor, "C D"], steps: int) -> Int64[Tensor, "N"]:
    labels = _nearest(keys, means)
    for _ in range(steps):
        means = _means(keys, labels, means)
        labels = _nearest(keys, means)
    return labels


def _nearest(keys: Tensor, means: Tensor, block: int = 4096) -> Tensor:
    # |k - m|^2 is smallest where k.m - |m|^2 / 2 is largest; blocks bound the memory.
    half_norms = means.square().sum(dim=1) / 2
    return torch.cat([(part @ means.T - half_norms).argmax(dim=1) for part in keys.split(block)])


def _means(keys: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    """Mean key of each cluster; an empty one stays where it was."""
    sums = torch.zeros_like(old).index_add_(0, labels, keys)
    counts = torch.bincount(labels, minlength=old.shape[0])[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), old)
