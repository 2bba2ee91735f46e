"""What the bench times of the community update, and the least work that it must do."""

from dataclasses import dataclass

import torch

from kvstitch.kernels.community_update.api import Communities, community_update


@dataclass(frozen=True)
class CommunityUpdateWorkload:
    """One new token for every row and head. The time must not depend on `length`.

    Args:
        batch: rows; layers may be stacked along them (the default is the 36 layers of Qwen3-8B at batch 1).
        heads, length, head_dim: shape.
        capacity: communities that may exist; half of them do.
        edges: keys that the token attends to.
        resolution, direct_share: as `community_update`.
    """

    batch: int = 36
    heads: int = 8
    length: int = 65536
    head_dim: int = 128
    capacity: int = 2048
    edges: int = 8
    resolution: float = 1.0
    direct_share: float = 0.5

    def inputs(self, device: str, seed: int = 0) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        shape, existing = (self.batch, self.heads), self.capacity // 2
        labels = torch.randint(
            0, existing, (*shape, self.length), generator=generator, device=device, dtype=torch.int32
        )
        labels[..., -1] = -1
        new = lambda *last: torch.rand(*shape, *last, generator=generator, device=device)
        exists = torch.arange(self.capacity, device=device) < existing
        degrees = new(self.capacity) * exists
        communities = Communities(
            labels=labels,
            centroids=new(self.capacity, self.head_dim) * exists[:, None],
            sizes=exists.int().expand(*shape, -1) * (self.length // existing),
            degrees=degrees,
            total_degree=degrees.sum(dim=-1),
            count=torch.full(shape, existing, dtype=torch.int32, device=device),
        )
        edge_shape = (*shape, self.edges)
        return {
            "communities": communities,
            "key": new(self.head_dim),
            "slot": torch.full((self.batch,), self.length - 1, device=device),
            "edge_slots": torch.randint(0, self.length - 1, edge_shape, generator=generator, device=device),
            "edge_weights": new(self.edges) / self.edges,
        }

    def run(self, inputs: dict, impl: str) -> torch.Tensor:
        return community_update(**inputs, resolution=self.resolution, direct_share=self.direct_share, impl=impl)

    def floor_flops(self) -> int:
        return 3 * self.batch * self.heads * self.head_dim

    def floor_bytes(self) -> int:
        """One key read, one centroid read and written, and E labels and degrees."""
        return self.batch * self.heads * 4 * (3 * self.head_dim + 4 * self.edges)
