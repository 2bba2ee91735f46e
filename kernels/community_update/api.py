"""The incremental step of CommunityKV (arXiv 2610.00418): one new token joins a community, or opens one."""

from dataclasses import dataclass

from jaxtyping import Float, Float32, Int, Int32
from torch import Tensor

from kvstitch.kernels.common.dispatch import resolve_implementation
from kvstitch.kernels.community_update.reference import community_update_reference


@dataclass(frozen=True)
class Communities:
    """The communities of a layer, one graph per head H of the graph (kv heads, or query heads). Updated in place.

    C is the capacity: communities that may exist. Centroids, sizes and degrees past `count` are zero.

    Args:
        labels: `[B, H, T]` community of each slot; -1 where the slot is in none (sinks, padding, not yet assigned).
        centroids: `[B, H, C, D]` mean key of the members.
        sizes: `[B, H, C]` members.
        degrees: `[B, H, C]` sum of the weighted degrees of the members, w_C.
        total_degree: `[B, H]` sum over all of them, 2m.
        count: `[B, H]` communities that exist.
    """

    labels: Int32[Tensor, "B H T"]
    centroids: Float32[Tensor, "B H C D"]
    sizes: Int32[Tensor, "B H C"]
    degrees: Float32[Tensor, "B H C"]
    total_degree: Float32[Tensor, "B H"]
    count: Int32[Tensor, "B H"]


def community_update(
    communities: Communities,
    key: Float[Tensor, "B H D"],
    slot: Int[Tensor, "B"],
    edge_slots: Int[Tensor, "B H E"],
    edge_weights: Float[Tensor, "B H E"],
    resolution: float,
    direct_share: float = 0.5,
    impl: str = "auto",
) -> Int32[Tensor, "B H"]:
    """Add one token's edges and give it the community with the largest gain in modularity, in O(D + E^2).

    Nothing depends on T: only E labels, E degrees and one centroid are touched. Layers may be stacked along B, so that
    one call serves a decode step: on a CPU the calls cost more than the arithmetic.

    The edges of token i, with alpha its attention to its top-E keys (itself among them or not) and l = `direct_share`:
    `w_ij = l / 2 alpha_ij + (1 - l) alpha_ii alpha_ij` to each key j, and `(1 - l) alpha_ij alpha_ik` between two of
    its keys. Labels that exist stay as they are. The gain of joining community C is
    `sum_{j in C} w_ij - resolution w_i w_C / 2m`, with w_C and 2m after the new edges (the paper leaves that open) and
    w_C without token i. The largest gain wins, the lower label among equals; if none is above zero the token opens a
    community. When all C exist, it joins the best one at a loss, or the newest if it has no neighbour.

    Args:
        communities: state, updated in place.
        key: the token's key, after RoPE.
        slot: slot of the token, not labelled yet; -1 leaves the row untouched (padding, a finished row).
        edge_slots: where the token attends; -1, and slots without a label, are ignored. The token's own slot may be
            among them.
        edge_weights: attention weights that go with them; one that is not finite is no edge.
        resolution: gamma of the modularity.
        direct_share: lambda; the share of direct attention in the graph's weights, the rest is co-attention.
        impl: "auto" (Triton on CUDA tensors), "triton", "reference".

    Returns: the token's community; -1 in rows left untouched.

    Raises: ValueError for a resolution that is not positive or a share outside [0, 1].
    """
    if resolution <= 0:
        raise ValueError(f"resolution must be positive, got {resolution}")
    if not 0 <= direct_share <= 1:
        raise ValueError(f"direct_share must be in [0, 1], got {direct_share}")
    options = (communities, key, slot, edge_slots, edge_weights, resolution, direct_share)
    if resolve_implementation(impl, key) == "reference":
        return community_update_reference(*options)
    from kvstitch.kernels.community_update.triton import community_update_triton

    return community_update_triton(*options)
