import pytest
import torch

from kvstitch.kernels.common.rows import gather_rows
from kvstitch.kernels.sparse_decode import expand_ranges, sparse_decode

SCALING = 0.15


def inputs(batch, query_heads, heads, length, dim, selections, width, dtype=torch.float32, seed=0):
    """Keys and values are views of larger storage, as a cache hands them out; slot lists are ragged and unordered."""
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    keys, values = (new(batch, heads, length + 13, dim)[:, :, :length] for _ in range(2))
    slots = torch.rand(batch, selections, length, generator=generator).argsort(-1)[..., :width]
    slots[0, 0, width // 2 :] = -1
    slots[-1, -1, 3:7] = -1
    return new(batch, query_heads, 1, dim), keys, values, slots


def by_loops(query, keys, values, slots, softcap=None, sink_logits=None):
    """Output `[B, Q, 1, D]` and, for each query head, {slot: weight}; one slot at a time, in float64."""
    batch, query_heads = query.shape[:2]
    heads, selections = keys.shape[1], slots.shape[1]
    output = torch.zeros(batch, query_heads, 1, values.shape[-1], dtype=torch.float64)
    weights = {}
    for row in range(batch):
        for query_head in range(query_heads):
            head = query_head * heads // query_heads
            chosen = [int(s) for s in slots[row, query_head * selections // query_heads] if s >= 0]
            own_query, own_keys = query[row, query_head, 0].double(), keys[row, head].double()
            logits = {s: float(own_query @ own_keys[s]) * SCALING for s in chosen}
            if softcap is not None:
                logits = {s: softcap * float(torch.tensor(x / softcap).tanh()) for s, x in logits.items()}
            exponentials = {s: float(torch.tensor(x, dtype=torch.float64).exp()) for s, x in logits.items()}
            total = sum(exponentials.values())
            if sink_logits is not None:
                total += float(sink_logits[query_head].double().exp())
            weights[row, query_head] = {s: x / total for s, x in exponentials.items()}
            for s, weight in weights[row, query_head].items():
                output[row, query_head, 0] += weight * values[row, head, s].double()
    return output, weights


def expected_top(weights, slots, query_heads, top_k, first_candidate):
    """Largest mean weights of each selection, by loops."""
    batch, selections, _ = slots.shape
    rows = query_heads // selections
    top_weights = torch.zeros(batch, selections, top_k, dtype=torch.float64)
    top_slots = torch.full((batch, selections, top_k), -1, dtype=torch.int32)
    for row in range(batch):
        for selection in range(selections):
            candidates = [int(s) for s in slots[row, selection, first_candidate:] if s >= 0]
            mean = {s: sum(weights[row, selection * rows + r][s] for r in range(rows)) / rows for s in candidates}
            for place, (s, weight) in enumerate(sorted(mean.items(), key=lambda item: (-item[1], item[0]))[:top_k]):
                top_weights[row, selection, place], top_slots[row, selection, place] = weight, s
    return top_weights, top_slots


CASES = {
    "plain": dict(shape=(2, 6, 2, 60, 16, 2, 21)),
    "each query head its own": dict(shape=(2, 6, 2, 60, 16, 6, 21), top_k=3),
    "two lists a kv head": dict(shape=(1, 8, 2, 60, 16, 4, 21), top_k=3),
    "edges": dict(shape=(2, 6, 2, 60, 16, 2, 21), top_k=4, first_candidate=5),
    "more edges than candidates": dict(shape=(1, 2, 1, 30, 8, 1, 9), top_k=8, first_candidate=2),
    "soft cap": dict(shape=(1, 4, 2, 50, 16, 2, 17), softcap=0.7, top_k=3),
    "sink logits": dict(shape=(1, 4, 2, 50, 16, 2, 17), sink_logits=torch.linspace(-1, 2, 4), top_k=3),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_loops(name):
    case = dict(CASES[name])
    query, keys, values, slots = inputs(*case.pop("shape"))
    model = {name: case[name] for name in ("softcap", "sink_logits") if name in case}
    output, weights = by_loops(query, keys, values, slots, **model)
    result = sparse_decode(query, keys, values, slots, SCALING, **case)
    torch.testing.assert_close(result.output.double(), output, atol=1e-6, rtol=1e-5)
    if "top_k" not in case:
        assert result.weights is None and result.slots is None
        return
    top = expected_top(weights, slots, query.shape[1], case["top_k"], case.get("first_candidate", 0))
    torch.testing.assert_close(result.weights.double(), top[0], atol=1e-6, rtol=1e-5)
    assert torch.equal(result.slots, top[1])


def test_all_slots_give_dense_attention_in_any_order():
    query, keys, values, _ = inputs(2, 6, 3, 40, 16, 3, 5)
    slots = torch.rand(2, 3, 40).argsort(-1)
    repeated = [tensor.repeat_interleave(2, dim=1) for tensor in (keys, values)]
    dense = torch.nn.functional.scaled_dot_product_attention(query, *repeated, scale=SCALING)
    torch.testing.assert_close(sparse_decode(query, keys, values, slots, SCALING).output, dense, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_selection_of_nothing_gives_nothing(top_k):
    query, keys, values, slots = inputs(2, 4, 2, 30, 8, 2, 6)
    slots[0, 1] = -1
    result = sparse_decode(query, keys, values, slots, SCALING, top_k=top_k)
    assert (result.output[0, 2:] == 0).all() and torch.isfinite(result.output).all()
    assert (result.output[0, :2] != 0).any()
    if top_k:
        assert (result.slots[0, 1] == -1).all() and (result.weights[0, 1] == 0).all()


@pytest.mark.parametrize("layout", ["contiguous", "view of storage", "transposed"])
def test_rows_come_from_any_layout(layout):
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(2, 3, 50, 8, generator=generator)
    tensor = {
        "contiguous": storage,
        "view of storage": storage[:, :, 4:44],
        "transposed": storage.transpose(2, 3).contiguous().transpose(2, 3),
    }[layout]
    slots = torch.randint(0, 40, (2, 6, 7), generator=generator)
    (rows,) = gather_rows((tensor,), slots)
    for row in range(2):
        for selection in range(6):
            assert torch.equal(rows[row, selection], tensor[row, selection // 2, slots[row, selection]])


def test_ranges_expand_in_order_and_are_cut_at_the_width():
    starts = torch.tensor([[[5, 20, 0], [7, 0, 3]]])
    lengths = torch.tensor([[[3, 0, 4], [0, 0, 2]]])
    expanded = expand_ranges(starts, lengths, 9)
    assert expanded.tolist() == [[[5, 6, 7, 0, 1, 2, 3, -1, -1], [3, 4, -1, -1, -1, -1, -1, -1, -1]]]
    assert expand_ranges(starts, lengths, 5).tolist() == [[[5, 6, 7, 0, 1], [3, 4, -1, -1, -1]]]


TRITON_CASES = {
    "float32, dim 64": (torch.float32, dict(shape=(2, 6, 2, 150, 64, 2, 70), top_k=4, first_candidate=5)),
    "float16, dim 80": (torch.float16, dict(shape=(1, 4, 2, 200, 80, 2, 131))),
    "bfloat16, dim 128": (torch.bfloat16, dict(shape=(1, 8, 2, 150, 128, 2, 65), top_k=8)),
    "float32, dim 96": (torch.float32, dict(shape=(1, 5, 1, 90, 96, 1, 33), softcap=0.7, top_k=2)),
    "bfloat16, dim 256": (torch.bfloat16, dict(shape=(1, 2, 2, 80, 256, 2, 40), sink_logits=torch.tensor([0.5, 2.0]))),
    "float32, dim 256": (torch.float32, dict(shape=(1, 5, 1, 60, 256, 1, 37), top_k=2)),
    "many heads": (torch.float32, dict(shape=(1, 20, 1, 60, 64, 1, 37), top_k=2)),
    "each query head its own": (torch.float32, dict(shape=(2, 4, 2, 90, 16, 4, 50), top_k=3)),
}


def eager(query, keys, values, slots, softcap=None, sink_logits=None):
    """Attention over the chosen slots as a model without fused kernels computes it in its own dtype."""
    chosen_keys, chosen_values = gather_rows((keys, values), slots)
    rows = query.reshape(query.shape[0], slots.shape[1], -1, query.shape[-1])
    logits = (rows @ chosen_keys.transpose(-1, -2) * SCALING).float().masked_fill((slots < 0)[:, :, None], -torch.inf)
    if sink_logits is not None:
        sinks = sink_logits.view(1, slots.shape[1], -1, 1).expand(query.shape[0], -1, -1, 1)
        logits = torch.cat((logits, sinks), -1)
    weights = logits.softmax(-1)[..., : slots.shape[2]].to(query.dtype)
    return (weights @ chosen_values).reshape(*query.shape[:3], -1)


@pytest.mark.parametrize("name", TRITON_CASES)
def test_triton_is_as_accurate_as_the_reference(name, run_triton, assert_as_accurate):
    dtype, case = TRITON_CASES[name]
    case = dict(case)
    query, keys, values, slots = inputs(*case.pop("shape"), dtype)
    model = {name: case[name] for name in ("softcap", "sink_logits") if name in case}
    result = run_triton(sparse_decode, query, keys, values, slots, SCALING, **case).result
    reference = sparse_decode(query, keys, values, slots, SCALING, **case)
    exact = sparse_decode(query.double(), keys.double(), values.double(), slots, SCALING, **case)
    low_precision = reference.output if dtype == torch.float32 else eager(query, keys, values, slots, **model)
    assert_as_accurate("output", result.output, low_precision, exact.output)
    if "top_k" in case:
        assert_as_accurate("weights", result.weights, reference.weights, exact.weights, magnitude=4)
        gap = torch.nn.functional.pad(exact.weights, (1, 1), value=2.0).diff(dim=-1).abs()
        clear = torch.minimum(gap[..., 1:], gap[..., :-1]) > 1e-5
        assert clear.any()
        assert torch.equal(result.slots[clear], exact.slots[clear])


def test_triton_gives_nothing_for_a_selection_of_nothing(run_triton):
    query, keys, values, slots = inputs(2, 4, 2, 30, 16, 2, 6)
    slots[0, 1] = -1
    result = run_triton(sparse_decode, query, keys, values, slots, SCALING, top_k=2).result
    assert (result.output[0, 2:] == 0).all() and torch.isfinite(result.output).all()
    assert (result.slots[0, 1] == -1).all() and (result.weights[0, 1] == 0).all()


def test_triton_gives_equal_weights_to_the_lower_slot(run_triton):
    query, keys, values, slots = inputs(1, 2, 1, 40, 16, 1, 12)
    slots = slots.abs().unique()[None, None]
    slots = slots[..., torch.randperm(slots.shape[-1], generator=torch.Generator().manual_seed(1))]
    keys[:] = keys[:, :, :1]
    result = run_triton(sparse_decode, query, keys, values, slots, SCALING, top_k=4).result
    assert result.slots[0, 0].tolist() == slots[0, 0].sort().values[:4].tolist()
    assert torch.equal(result.slots, sparse_decode(query, keys, values, slots, SCALING, top_k=4).slots)


def test_refusals():
    query, keys, values, slots = inputs(1, 6, 2, 30, 8, 2, 6)
    with pytest.raises(ValueError, match="got 3 lists for 2 kv heads and 6 query heads"):
        sparse_decode(query, keys, values, slots[:, :1].expand(-1, 3, -1), SCALING)
    with pytest.raises(ValueError, match="at least one column; -1 stands for no slot"):
        sparse_decode(query, keys, values, slots[..., :0], SCALING)
    with pytest.raises(ValueError, match="must not be negative, got -1 and 0"):
        sparse_decode(query, keys, values, slots, SCALING, top_k=-1)
    with pytest.raises(ValueError, match="softcap must be positive, or None for none, got 0"):
        sparse_decode(query, keys, values, slots, SCALING, softcap=0.0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("model", [{}, {"softcap": 0.7, "sink_logits": torch.linspace(-1, 2, 4)}])
def test_logsumexp_is_that_of_what_was_attended_to(impl, model, request):
    query, keys, values, slots = inputs(2, 4, 2, 50, 16, 2, 17)
    slots[0, 1] = -1
    if impl == "triton":
        decode = request.getfixturevalue("run_triton")
        result = decode(sparse_decode, query, keys, values, slots, SCALING, return_logsumexp=True, **model).result
    else:
        result = sparse_decode(query, keys, values, slots, SCALING, return_logsumexp=True, **model)
    (chosen,) = gather_rows((keys.double(),), slots)
    logits = (query.double().view(2, 2, 2, 16) @ chosen.transpose(-1, -2) * SCALING).flatten(1, 2)
    if model:
        logits = model["softcap"] * torch.tanh(logits / model["softcap"])
    logits = logits.masked_fill((slots < 0).repeat_interleave(2, dim=1), -torch.inf)
    if model:
        logits = torch.cat((logits, model["sink_logits"].double()[None, :, None].expand(2, -1, -1)), dim=-1)
    expected = logits.logsumexp(dim=-1)
    torch.testing.assert_close(result.logsumexp.double(), expected, atol=2e-6, rtol=1e-5)
    assert bool(model) or (result.logsumexp[0, 2:] == -torch.inf).all()
    assert sparse_decode(query, keys, values, slots, SCALING).logsumexp is None


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_community_ranges_are_read(impl, request):
    """Ragged ranges in another order than the slots', one of them empty, a selection that ends early."""
    query, keys, values, _ = inputs(1, 4, 2, 60, 16, 2, 6)
    slots = expand_ranges(torch.tensor([[[40, 3, 11], [0, 50, 20]]]), torch.tensor([[[9, 0, 14], [2, 5, 0]]]), 23)
    assert (slots[0, 1] >= 0).sum() == 7
    expected, _ = by_loops(query, keys, values, slots)
    if impl == "triton":
        result = request.getfixturevalue("run_triton")(sparse_decode, query, keys, values, slots, SCALING).result
    else:
        result = sparse_decode(query, keys, values, slots, SCALING)
    torch.testing.assert_close(result.output.double(), expected, atol=2e-6, rtol=1e-5)
