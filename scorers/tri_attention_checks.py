"""Whether offline statistics of TriAttention can belong to a live model, and what tells them apart if not."""

from typing import TYPE_CHECKING

import torch

from kvstitch.views import Rotary

if TYPE_CHECKING:
    from kvstitch.scorers.tri_attention_statistics import TriAttentionStatistics


def layout_name(interleaved: bool) -> str:
    """What files call a RoPE that pairs dims 2f and 2f + 1, and one that pairs dims of the two halves."""
    return "interleaved" if interleaved else "half"


def shape_mismatch(
    statistics: "TriAttentionStatistics", num_layers: int, num_query_heads: int, num_kv_heads: int, head_dim: int
) -> str | None:
    """What the statistics cover and the model has instead, continuing "statistics …"; None if they fit."""
    layers, heads, planes = statistics.mean.shape
    if layers != num_layers or heads != num_query_heads or heads % num_kv_heads:
        return (
            f"cover {layers} layers of {heads} query heads, the model has {num_layers} layers of {num_query_heads} query "
            f"heads and {num_kv_heads} kv heads"
        )
    if 2 * planes != head_dim:
        return (
            f"hold {planes} planes a head, for heads of {2 * planes} dims; the model's heads have {head_dim} dims, which "
            f"are {head_dim // 2} planes"
        )
    return None


def rotary_mismatch(statistics: "TriAttentionStatistics", rotary: Rotary) -> str | None:
    """As `shape_mismatch`, of the RoPE; of statistics whose shape fits."""
    if statistics.interleaved != rotary.interleaved:
        own, other = layout_name(statistics.interleaved), layout_name(rotary.interleaved)
        return f"pair dims as {own!r}, the model's RoPE as {other!r}"
    known = statistics.inverse_frequencies
    # Planes that RoPE leaves alone count as ones of frequency 0, whether or not the model lists them.
    live = torch.zeros_like(known)
    live[: len(rotary.inverse_frequencies)] = rotary.inverse_frequencies
    turned, expected = int(known.count_nonzero()), int(live.count_nonzero())
    if turned != expected:
        return f"have {turned} of {len(known)} planes that RoPE turns, the model {expected} of {len(known)}"
    if not torch.allclose(live, known, rtol=1e-5, atol=0):
        worst = ((live - known).abs() / known.clamp(min=1e-300)).max()
        return f"were taken at other RoPE frequencies than the model's (off by {worst:.1%})"
    if abs(statistics.attention_scaling - rotary.attention_scaling) > 1e-5:
        return f"were taken with attention scaling {statistics.attention_scaling}, the model has {rotary.attention_scaling}"
    return None
