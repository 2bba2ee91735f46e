"""Top-k attention in plain torch: what runs on a CPU, and what the Triton kernels are held against."""

import torch
from torch import Tensor

from kvstitch.kernels.common.ordering import TILE, largest, largest_columns

# Logits of one block of queries: large enough for an efficient matmul, small enough to stay in the last-level cache.
_BLOCK_BYTES = 16 * 2**20


@torch.no_grad()
def topk_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scaling: float,
    top_k: int,
    num_sinks: int,
    aggregation: str,
    group_mean: str,
    first_key: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    logsumexp: Tensor | None,
    query_stride: int = 1,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Arguments and results of `api.topk_attention`; without `value` no output is computed.

    Queries go in blocks whose rows of weights exist only for a moment, so memory is linear in the number of keys. Since
    whole rows are there, the exact group mean needs no second pass. Queries that `query_stride` leaves out are not looked
    at where there is no `value`, and spared the selection where there is one.
    """
    batch, query_heads, num_queries = query.shape[:3]
    heads, num_keys = key.shape[1:3]
    computed = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query_heads // heads
    exact = aggregation == "query_group" and group_mean == "exact"
    merged = aggregation == "query_group" and group_mean == "merged"
    graph_heads = heads if aggregation == "query_group" else query_heads
    weights = torch.zeros(batch, graph_heads, num_queries, top_k, dtype=computed, device=query.device)
    indices = torch.full(weights.shape, -1, dtype=torch.int32, device=query.device)
    output = None if value is None else query.new_zeros(batch, query_heads, num_queries, value.shape[-1])
    first_of_row = [0] * batch if first_key is None else first_key.tolist()
    for row, first in enumerate(first_of_row):
        # Left padding: the row is a shorter one that starts at its first real key and its first real query.
        padded_queries = max(0, first - (num_keys - num_queries))
        if padded_queries >= num_queries:
            continue
        offset = num_keys - first - (num_queries - padded_queries)
        skipped, step, spared = (-offset - 1) % query_stride, query_stride, 1
        if value is not None:
            skipped, step, spared = 0, 1, query_stride
        offset += skipped
        rows = slice(padded_queries + skipped, num_queries, step)
        row_state = _Row(
            query=query[row, :, rows],
            key=_padded(key[row, :, first:], computed).mul_(scaling),
            value=None if value is None else _padded(value[row, :, first:], computed),
            offset=offset,
            step=step,
            softcap=softcap,
            sink_logits=None if sink_logits is None else sink_logits.to(computed),
            logsumexp=None if logsumexp is None else logsumexp[row, :, rows].to(computed),
        )
        for block, attention in row_state.blocks():
            if output is not None:
                output[row, :, rows][:, block] = row_state.output_of(attention)
            listed = slice((-offset - block.start - 1) % spared, None, spared)
            attention = attention[:, listed]
            if attention.shape[1] == 0:
                continue
            if exact:
                attention = row_state.group_sum(attention)
            attention[..., :num_sinks] = 0
            top = _block_edges(attention, top_k)
            if merged:
                top = merge_heads(*top, heads)
            weights[row, :, rows][:, block][:, listed] = top[0] / group if exact else top[0]
            indices[row, :, rows][:, block][:, listed] = torch.where(top[1] < 0, -1, top[1] + first).int()
    return output, weights, indices


class _Row:
    """One batch row without its padding; yields blocks of attention weights `[Q, M, C]`.

    `key` and `value` are padded to whole tiles and in the dtype of the computation, `key` times the scaling. Query i is
    the token of key `offset + i * step`.
    """

    def __init__(self, query, key, value, offset, step, softcap, sink_logits, logsumexp):
        self.query, self.key, self.value = query, key, value
        self.softcap, self.sink_logits, self.logsumexp = softcap, sink_logits, logsumexp
        self.offset, self.step = offset, step
        widest = key.shape[1] * query.shape[0]
        self.block = min(128, max(16, _BLOCK_BYTES // (widest * key.element_size()) // 8 * 8))
        # One buffer for all blocks: each is wider than the one before, so the allocator would take fresh pages for it,
        # and touching those costs as much as the softmax.
        rows = min(self.block, query.shape[1])
        self.buffer = key.new_empty(widest * rows)
        self.sum_buffer = key.new_empty(key.shape[0] * key.shape[1] * rows)

    def blocks(self):
        """(slice of queries, weights): C covers the keys that the block can see, rounded up to whole tiles."""
        query_heads, num_queries, dim = self.query.shape
        heads = self.key.shape[0]
        for start in range(0, num_queries, self.block):
            stop = min(start + self.block, num_queries)
            first = self.offset + start * self.step
            columns = _round_up(self.offset + (stop - 1) * self.step + 1, TILE)
            rows = self.query[:, start:stop].to(self.key.dtype).reshape(heads, -1, dim)
            logits = self.buffer[: query_heads * (stop - start) * columns].view(heads, -1, columns)
            logits = torch.bmm(rows, self.key[:, :columns].transpose(1, 2), out=logits).view(query_heads, -1, columns)
            if self.softcap is not None:
                logits.div_(self.softcap).tanh_().mul_(self.softcap)
            keys = torch.arange(first, columns, device=logits.device)
            seen = keys[:: self.step][: stop - start]
            logits[..., first:].masked_fill_(keys > seen[:, None], -torch.inf)
            yield slice(start, stop), self._softmax(logits, start, stop)

    def group_sum(self, attention: Tensor) -> Tensor:
        """`[H, M, C]`, over the query heads of each kv head."""
        query_heads, count, columns = attention.shape
        heads = self.key.shape[0]
        if heads == query_heads:
            return attention
        per_head = attention.view(heads, -1, count, columns).unbind(dim=1)
        total = self.sum_buffer[: heads * count * columns].view(heads, count, columns)
        torch.add(per_head[0], per_head[1], out=total)
        for weights in per_head[2:]:
            total += weights
        return total

    def _softmax(self, logits: Tensor, start: int, stop: int) -> Tensor:
        if self.logsumexp is not None:
            normaliser = self.logsumexp[:, start:stop, None]
        elif self.sink_logits is not None:
            normaliser = torch.logaddexp(logits.logsumexp(-1, keepdim=True), self.sink_logits[:, None, None])
        else:
            return torch.softmax(logits, dim=-1, out=logits)
        return logits.sub_(normaliser).exp_()

    def output_of(self, attention: Tensor) -> Tensor:
        query_heads, count, columns = attention.shape
        rows = attention.view(self.key.shape[0], -1, columns)
        return torch.bmm(rows, self.value[:, :columns]).view(query_heads, count, -1)


def _block_edges(attention: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Top-k of one block, `[H or Q, M, k]`."""
    graph_heads, count, _ = attention.shape
    weights, indices = largest_columns(attention.flatten(0, 1).contiguous(), top_k)
    return weights.view(graph_heads, count, top_k), indices.view(graph_heads, count, top_k)


def merge_heads(weights: Tensor, indices: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Top-k of a group from the top-k of its heads: a key's weights are summed over the heads that list it, over G.

    Args:
        weights: `[Q, M, k]`; zero where there is no edge.
        indices: `[Q, M, k]`, -1 where there is no edge.

    Returns: weights and indices `[H, M, k]`.
    """
    query_heads, count, top_k = weights.shape
    group = query_heads // heads
    rows = (heads, group, count, top_k)
    listed = indices.view(rows).transpose(1, 2).reshape(heads * count, group * top_k)
    weight = weights.view(rows).transpose(1, 2).reshape(heads * count, group * top_k)
    same = listed[:, :, None] == listed[:, None, :]
    total = torch.bmm(same.to(weight.dtype), weight[:, :, None])[..., 0] / group
    # Each key counts where it is listed first.
    repeated = same.tril(-1).any(-1) | (listed < 0)
    weights, indices = largest(total.masked_fill(repeated, 0), listed.clamp(min=0), top_k)
    return weights.view(heads, count, top_k), indices.view(heads, count, top_k)


def _padded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`[H, C, D]` with C rounded up to whole tiles; the rows added are zero and later than any query."""
    out = torch.zeros(rows.shape[0], _round_up(rows.shape[1], TILE), rows.shape[2], dtype=dtype, device=rows.device)
    out[:, : rows.shape[1]] = rows
    return out


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
