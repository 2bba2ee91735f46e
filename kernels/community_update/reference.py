"""The incremental community step in plain torch: what runs on a CPU, and what the Triton kernel is held against."""

import torch
from torch import Tensor


@torch.no_grad()
def community_update_reference(
    communities,
    key: Tensor,
    slot: Tensor,
    edge_slots: Tensor,
    edge_weights: Tensor,
    resolution: float,
    direct_share: float,
) -> Tensor:
    """Arguments and result of `api.community_update`; all rows and heads at once, no value is looked at on the host."""
    labels, capacity = communities.labels, communities.sizes.shape[2]
    active = (slot >= 0)[:, None]
    attention, own, label, neighbour = _read_edges(labels, slot, edge_slots, edge_weights)

    to_token = attention * (0.5 * direct_share + (1 - direct_share) * own)
    token_degree = to_token.sum(-1, keepdim=True)
    grown = to_token + (1 - direct_share) * attention * (attention.sum(-1, keepdim=True) - attention)
    communities.total_degree.add_(grown.sum(-1)).add_(token_degree[..., 0])
    communities.degrees.scatter_add_(2, label, grown)

    # Both are zero where there is no neighbour, so `same` need not know.
    same = (label[..., :, None] == label[..., None, :]).to(to_token.dtype)
    link = (same @ to_token[..., None])[..., 0]
    scale = token_degree / communities.total_degree.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    gain = (link - resolution * scale * communities.degrees.gather(2, label)).masked_fill_(~neighbour, -torch.inf)
    best = gain.amax(dim=-1, keepdim=True)
    best_label = label.masked_fill((gain < best) | ~neighbour, capacity).amin(dim=-1)
    full = communities.count >= capacity
    joins = (best[..., 0] > 0) | (full & neighbour.any(dim=-1))
    chosen = torch.where(joins, best_label, communities.count.clamp(max=capacity - 1))
    communities.count.add_(~(joins | full) & active)

    member = chosen[..., None]
    communities.degrees.scatter_add_(2, member, token_degree)
    _add_member(communities, member, key, active)
    target = slot.clamp(min=0)[:, None, None].expand_as(member).long()
    labels.scatter_(2, target, torch.where(active[..., None], member.int(), labels.gather(2, target)))
    return chosen.int().masked_fill_(~active, -1)


def _read_edges(
    labels: Tensor, slot: Tensor, edge_slots: Tensor, edge_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention to labelled neighbours (0 elsewhere) and `[B, H, 1]` to the token itself; labels of the neighbours (0
    elsewhere), and which edges lead to one: none in a row that is left untouched."""
    edge_weights = edge_weights.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    own = (edge_weights * (edge_slots == slot[:, None, None])).sum(-1, keepdim=True)
    label = labels.gather(2, edge_slots.long().clamp(min=0))
    neighbour = (edge_slots >= 0) & (label >= 0) & (slot >= 0)[:, None, None]
    return edge_weights.masked_fill(~neighbour, 0), own, label.long().masked_fill_(~neighbour, 0), neighbour


def _add_member(communities, member: Tensor, key: Tensor, active: Tensor) -> None:
    """Size and centroid of the chosen community `[B, H, 1]`."""
    joined = active[..., None].expand_as(member)
    communities.sizes.scatter_add_(2, member, joined.int())
    share = joined / communities.sizes.gather(2, member).clamp(min=1)
    row = member[..., None].expand(-1, -1, -1, key.shape[-1])
    mean = communities.centroids.gather(2, row)
    communities.centroids.scatter_add_(2, row, (key.float()[:, :, None] - mean) * share[..., None])
