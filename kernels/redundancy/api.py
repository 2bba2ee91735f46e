"""How much of each key is already said by others (the redundancy term of R-KV, arXiv 2505.24133)."""

from jaxtyping import Bool, Float, Float32
from torch import Tensor

from kvstitch.kernels.redundancy.blocked import redundancy_blocked
from kvstitch.kernels.redundancy.reference import redundancy_reference

IMPLEMENTATIONS = ("auto", "blocked", "reference")


def key_redundancy(
    keys: Float[Tensor, "B H T D"],
    members: Bool[Tensor, "B H T"],
    threshold: float,
    impl: str = "auto",
) -> Float32[Tensor, "B H T"]:
    """Softmax over slots of the mean cosine that the other keys of a head have with each key.

    With `S_ij = cos(k_i, k_j)` among the members, `S_ii = 0`, and in each row i the largest j with `S_ij > threshold`
    set to 0 (the newest of similar keys is not held redundant): `r = softmax_j((1 / n) sum_i S_ij)`, n members.

    Args:
        keys: slots in ascending order of position; any float dtype, computed in float32.
        members: slots that take part; the others neither count nor are counted, whatever their keys hold.
        threshold: in [0, 1).
        impl: "blocked" (row blocks, memory linear in T), "reference" (T x T matrix), "auto" = "blocked".

    Returns: sums to one over the members of a head; 0 elsewhere.

    Raises: ValueError for a threshold outside [0, 1) or an unknown `impl`.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if impl == "reference":
        return redundancy_reference(keys.float(), members, threshold)
    return redundancy_blocked(keys.float(), members, threshold)
