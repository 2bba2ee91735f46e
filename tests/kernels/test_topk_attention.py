import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvstitch.kernels.common.ordering import largest, largest_columns
from kvstitch.kernels.topk_attention import topk_attention, topk_edges

SCALING = 0.2


def inputs(batch, query_heads, heads, num_queries, num_keys, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    return (
        new(batch, query_heads, num_queries, dim),
        new(batch, heads, num_keys, dim),
        new(batch, heads, num_keys, dim),
    )


def dense_weights(query, key, first_key=None, softcap=None, sink_logits=None):
    """Softmax weights `[B, Q, N, T]` from the whole matrix, in float64; zero rows for padded queries."""
    query, key = query.double(), key.double()
    num_queries, num_keys = query.shape[2], key.shape[2]
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2) * SCALING
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(num_keys - num_queries, num_keys)
    column = torch.arange(num_keys)
    first = torch.zeros(query.shape[0], dtype=torch.long) if first_key is None else first_key
    seen = (column <= position[:, None]) & (column >= first[:, None, None, None])
    total = logits.exp().where(seen, 0).sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + sink_logits.double().exp()[:, None, None]
    return logits.exp().where(seen, 0) / total.where(seen.any(-1, keepdim=True), 1)


def dense_output(weights, value):
    return weights @ value.double().repeat_interleave(weights.shape[1] // value.shape[1], dim=1)


def eligible(weights, num_sinks, first_key=None):
    """Weights without those of the sinks."""
    first = torch.zeros(weights.shape[0], dtype=torch.long) if first_key is None else first_key
    sinks = torch.arange(weights.shape[-1]) < (first + num_sinks)[:, None, None, None]
    return weights.masked_fill(sinks, 0)


def group_mean(weights, heads):
    batch, query_heads, num_queries, num_keys = weights.shape
    return weights.view(batch, heads, query_heads // heads, num_queries, num_keys).mean(2)


def eager(query, key, value):
    """Attention as a model without fused kernels computes it in its own dtype."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    num_queries, num_keys = query.shape[2], key.shape[2]
    late = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    logits = (query @ key.transpose(-1, -2) * SCALING).masked_fill(late, -torch.inf)
    return logits.float().softmax(-1).to(query.dtype) @ value


def check_edges(edges, expected, tolerance=2e-6):
    """`edges` are the largest of the float64 weights `expected`; of two closer than rounding either may lead."""
    weights, indices = edges[-2:]
    best = expected.topk(min(weights.shape[-1], expected.shape[-1]), dim=-1).values
    best = torch.nn.functional.pad(best, (0, weights.shape[-1] - best.shape[-1]))
    torch.testing.assert_close(weights.double(), best, atol=tolerance, rtol=2e-5)
    assert ((indices < 0) == (weights == 0)).all()
    at_index = expected.gather(-1, indices.clamp(min=0).long()).where(indices >= 0, 0)
    torch.testing.assert_close(weights.double(), at_index, atol=tolerance, rtol=2e-5)
    reported = indices.sort(dim=-1).values
    assert ((reported[..., 1:] != reported[..., :-1]) | (reported[..., 1:] < 0)).all(), "a key is reported twice"


CASES = {
    "plain": dict(shape=(2, 6, 2, 37, 37, 16), top_k=4),
    "one query": dict(shape=(1, 4, 2, 1, 1, 8), top_k=2),
    "chunk of a longer prefill": dict(shape=(1, 4, 2, 21, 150, 16), top_k=8, num_sinks=5),
    "several blocks": dict(shape=(1, 3, 1, 300, 300, 8), top_k=3, num_sinks=10),
    "left padding": dict(shape=(3, 4, 2, 40, 40, 16), top_k=5, num_sinks=3, first_key=torch.tensor([0, 13, 39])),
    "padding in an earlier chunk": dict(shape=(2, 4, 2, 9, 50, 16), top_k=5, first_key=torch.tensor([20, 45])),
    "soft cap and sink logits": dict(shape=(1, 4, 2, 33, 33, 16), top_k=4, softcap=1.5, sink_logits=torch.randn(4)),
    "no group": dict(shape=(1, 3, 3, 40, 40, 16), top_k=4, num_sinks=2),
    "more edges than keys": dict(shape=(1, 2, 1, 6, 6, 8), top_k=9, num_sinks=1),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_finds_the_edges_of_the_whole_matrix(name):
    case = dict(CASES[name])
    query, key, value = inputs(*case.pop("shape"))
    model = {name: case[name] for name in ("first_key", "softcap", "sink_logits") if name in case}
    weights = dense_weights(query, key, **model)
    expected = eligible(weights, case.get("num_sinks", 0), case.get("first_key"))
    grouped = topk_attention(query, key, value, SCALING, **case)
    torch.testing.assert_close(grouped.output.double(), dense_output(weights, value), atol=2e-6, rtol=1e-5)
    check_edges(grouped, group_mean(expected, key.shape[1]))
    check_edges(topk_attention(query, key, value, SCALING, aggregation="per_head", **case), expected)
    check_edges(topk_edges(query, key, SCALING, **case), group_mean(expected, key.shape[1]))


@pytest.mark.parametrize("stride", [2, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_stride_leaves_the_edges_of_some_queries(name, stride, monkeypatch):
    """Those of the whole matrix where the token's number is a multiple, none elsewhere; the output is that of all."""
    monkeypatch.setattr("kvstitch.kernels.topk_attention.reference._BLOCK_BYTES", 0)
    case = dict(CASES[name])
    query, key, value = inputs(*case.pop("shape"))
    model = {name: case[name] for name in ("first_key", "softcap", "sink_logits") if name in case}
    weights = dense_weights(query, key, **model)
    expected = eligible(weights, case.get("num_sinks", 0), case.get("first_key"))
    first = case.get("first_key", torch.zeros(query.shape[0], dtype=torch.long)).view(-1, 1, 1, 1)
    number = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None] - first + 1
    expected = expected.masked_fill(number % stride != 0, 0)
    joint = topk_attention(query, key, value, SCALING, query_stride=stride, **case)
    torch.testing.assert_close(joint.output.double(), dense_output(weights, value), atol=2e-6, rtol=1e-5)
    check_edges(joint, group_mean(expected, key.shape[1]))
    check_edges(topk_edges(query, key, SCALING, query_stride=stride, **case), group_mean(expected, key.shape[1]))
    for options in (dict(aggregation="per_head"), dict(group_mean="merged")):
        joint = topk_attention(query, key, value, SCALING, query_stride=stride, **options, **case)
        alone = topk_edges(query, key, SCALING, query_stride=stride, **options, **case)
        every = topk_edges(query, key, SCALING, **options, **case)
        for edges in (joint, alone):
            torch.testing.assert_close(
                edges.weights, every.weights.where(number % stride == 0, 0), atol=1e-6, rtol=1e-5
            )
            assert ((edges.indices < 0) == (edges.weights == 0)).all()


def test_reference_merges_heads_as_loops_do():
    query, key, value = inputs(1, 6, 2, 25, 25, 16)
    per_head = topk_attention(query, key, value, SCALING, top_k=3, num_sinks=2, aggregation="per_head")
    merged = topk_attention(query, key, value, SCALING, top_k=3, num_sinks=2, group_mean="merged")
    for head in range(2):
        for token in range(25):
            total = {}
            for query_head in range(3 * head, 3 * head + 3):
                listed = zip(per_head.indices[0, query_head, token], per_head.weights[0, query_head, token])
                for index, weight in listed:
                    if index >= 0:
                        total[int(index)] = total.get(int(index), 0) + float(weight) / 3
            best = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:3]
            best += [(-1, 0.0)] * (3 - len(best))
            assert merged.indices[0, head, token].tolist() == [index for index, _ in best]
            assert merged.weights[0, head, token].tolist() == pytest.approx([weight for _, weight in best], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_weights_go_to_the_lower_key(dtype):
    query, key, value = inputs(1, 2, 1, 130, 130, 8, dtype)
    key[:] = key[:, :, :1]
    edges = topk_attention(query, key, value, SCALING, top_k=4, num_sinks=3)
    assert edges.indices[0, 0, 100].tolist() == [3, 4, 5, 6]
    assert edges.indices[0, 0, 4].tolist() == [3, 4, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_level_selection_equals_a_sort(dtype):
    generator = torch.Generator().manual_seed(0)
    # Few distinct values, so that ties straddle tiles, and many zeros.
    weights = torch.randint(0, 6, (40, 512), generator=generator).to(dtype)
    weights[:20] *= torch.rand(20, 512, generator=generator) < 0.02
    values, columns = weights.sort(dim=-1, descending=True, stable=True)
    expected = columns[:, :6].masked_fill(values[:, :6] == 0, -1)
    for found in (largest_columns(weights, 6), largest(weights, torch.arange(512), 6)):
        assert torch.equal(found[0], values[:, :6])
        assert torch.equal(found[1], expected)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


class SortedColumns(TorchDispatchMode):
    """The widest row that is sorted."""

    def __init__(self):
        super().__init__()
        self.widest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith(("aten.sort", "aten.topk")):
            self.widest = max(self.widest, args[0].shape[-1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_row_is_sorted(dtype):
    weights = torch.rand(3, 2048, generator=torch.Generator().manual_seed(0), dtype=dtype)
    with SortedColumns() as sorted_columns:
        largest_columns(weights, 6)
    assert 0 < sorted_columns.widest <= 2048 // 32


def test_reference_never_holds_all_pairs(monkeypatch):
    monkeypatch.setattr("kvstitch.kernels.topk_attention.reference._BLOCK_BYTES", 0)
    query, key, value = inputs(1, 2, 1, 192, 192, 8)
    with LargestTensor() as largest_tensor:
        topk_attention(query, key, value, SCALING, top_k=4)
    assert largest_tensor.elements < 192 * 192 / 4


def test_bfloat16_reference_rounds_once():
    query, key, value = inputs(1, 4, 2, 50, 50, 16, torch.bfloat16)
    weights = dense_weights(query, key)
    result = topk_attention(query, key, value, SCALING, top_k=4)
    assert result.output.dtype == torch.bfloat16 and result.weights.dtype == torch.float32
    torch.testing.assert_close(result.output, dense_output(weights, value).bfloat16(), atol=1e-3, rtol=2**-7)
    check_edges(result, group_mean(weights, 2))


TRITON_CASES = {
    "exact mean, dim 64": (torch.float32, dict(shape=(1, 6, 2, 37, 37, 64), top_k=4, num_sinks=3)),
    "merged, dim 80": (torch.float32, dict(shape=(1, 4, 2, 35, 50, 80), top_k=2, group_mean="merged")),
    "per head, dim 96": (torch.float16, dict(shape=(1, 2, 1, 33, 33, 96), top_k=8, aggregation="per_head")),
    "exact mean, dim 128": (torch.bfloat16, dict(shape=(1, 3, 1, 70, 135, 128), top_k=8, num_sinks=10)),
    "per head, dim 256": (torch.bfloat16, dict(shape=(1, 2, 2, 19, 40, 256), top_k=16, aggregation="per_head")),
    "32 edges, exact mean": (torch.float32, dict(shape=(1, 2, 1, 40, 40, 16), top_k=32, num_sinks=2)),
    "32 edges, merged": (torch.float32, dict(shape=(1, 2, 1, 20, 40, 16), top_k=32, group_mean="merged")),
    "merged, half": (torch.float16, dict(shape=(1, 4, 1, 20, 41, 64), top_k=3, group_mean="merged")),
    "padding": (
        torch.float32,
        dict(shape=(3, 2, 1, 40, 40, 16), top_k=5, num_sinks=3, first_key=torch.tensor([0, 13, 39])),
    ),
    "padding, merged": (
        torch.float32,
        dict(shape=(2, 2, 1, 40, 40, 16), top_k=5, num_sinks=3, first_key=torch.tensor([35, 13]), group_mean="merged"),
    ),
    "soft cap and sink logits": (
        torch.float32,
        dict(shape=(1, 4, 2, 33, 33, 16), top_k=4, softcap=1.5, sink_logits=torch.linspace(-2, 2, 4)),
    ),
}


@pytest.mark.parametrize("name", TRITON_CASES)
def test_triton_is_as_accurate_as_the_reference(name, run_triton, assert_as_accurate):
    dtype, case = TRITON_CASES[name]
    case = dict(case)
    query, key, value = inputs(*case.pop("shape"), dtype)
    model = {name: case[name] for name in ("first_key", "softcap", "sink_logits") if name in case}
    weights = dense_weights(query, key, **model)
    result = run_triton(topk_attention, query, key, value, SCALING, **case).result
    reference = topk_attention(query, key, value, SCALING, **case)
    exact = dense_output(weights, value)
    low_precision = reference.output if dtype == torch.float32 else eager(query, key, value)
    assert_as_accurate("output", result.output, low_precision, exact)
    assert torch.equal(result.indices < 0, result.weights == 0)
    assert torch.equal(result.indices < 0, reference.indices < 0)
    in_double = topk_attention(query.double(), key.double(), value.double(), SCALING, **case)
    assert_as_accurate("weights", result.weights, reference.weights, in_double.weights, magnitude=4)
    # Where neighbours in the order are further apart than rounding, the keys must be the same.
    gap = torch.nn.functional.pad(in_double.weights, (1, 1), value=2.0).diff(dim=-1).abs()
    clear = torch.minimum(gap[..., 1:], gap[..., :-1]) > 1e-5
    assert clear.any()
    assert torch.equal(result.indices[clear], in_double.indices[clear])


def test_triton_gives_equal_weights_to_the_lower_key(run_triton):
    query, key, value = inputs(1, 2, 1, 90, 90, 16)
    key[:] = key[:, :, :1]
    for option in (dict(), dict(group_mean="merged")):
        result = run_triton(topk_attention, query, key, value, SCALING, top_k=4, num_sinks=3, **option).result
        assert result.indices[0, 0, 70].tolist() == [3, 4, 5, 6]
        assert result.indices[0, 0, 4].tolist() == [3, 4, -1, -1]


def test_triton_drops_what_a_stride_leaves_out(run_triton):
    case = dict(shape=(2, 4, 2, 20, 33, 16), top_k=3, num_sinks=2, first_key=torch.tensor([0, 15]), query_stride=3)
    query, key, value = inputs(*case.pop("shape"))
    result = run_triton(topk_attention, query, key, value, SCALING, **case).result
    expected = topk_attention(query, key, value, SCALING, **case)
    assert torch.equal(result.indices, expected.indices) and (expected.indices >= 0).any()
    torch.testing.assert_close(result.weights, expected.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_edges_alone_use_a_given_logsumexp(impl, request):
    query, key, value = inputs(1, 4, 2, 30, 45, 16)
    logits = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * SCALING
    late = torch.ones(30, 45, dtype=torch.bool).triu(16)
    logsumexp = logits.masked_fill(late, -torch.inf).logsumexp(-1).float()
    expected = topk_attention(query, key, value, SCALING, top_k=3, num_sinks=2)
    arguments = (query, key, SCALING, 3, 2)
    if impl == "reference":
        edges = topk_edges(*arguments, logsumexp=logsumexp)
    else:
        edges = request.getfixturevalue("run_triton")(topk_edges, *arguments, logsumexp=logsumexp).result
    torch.testing.assert_close(edges.weights, expected.weights, atol=1e-6, rtol=1e-5)
    assert (edges.indices == expected.indices).float().mean() > 0.99


def test_refusals():
    query, key, value = inputs(1, 4, 2, 5, 5, 8)
    with pytest.raises(ValueError, match="multiple of kv heads, got 3 and 2"):
        topk_attention(query[:, :3], key, value, SCALING, 2)
    with pytest.raises(ValueError, match="N=5, T=4"):
        topk_edges(query, key[:, :, :4], SCALING, 2)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        topk_attention(query, key, value, SCALING, 0)
    with pytest.raises(ValueError, match="query_stride must be at least 1 .*, got 0"):
        topk_edges(query, key, SCALING, 2, query_stride=0)
    with pytest.raises(ValueError, match="'query_group', 'per_head', got 'layer'"):
        topk_attention(query, key, value, SCALING, 2, aggregation="layer")
    with pytest.raises(ValueError, match="'exact', 'merged', got 'sum'"):
        topk_edges(query, key, SCALING, 2, group_mean="sum")
    with pytest.raises(ValueError, match="'auto', 'triton', 'reference', got 'cuda'"):
        topk_attention(query, key, value, SCALING, 2, impl="cuda")
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        topk_attention(query, key, value, SCALING, 2, impl="triton")
