"""Attention over chosen slots and over what stands in for the rest, against float64."""

import pytest
import torch

from kvstitch.allocators.retrieval import Reads, Rest
from kvstitch.presses.retrieval_attention import attend, attention_mass, joined_with_rest


def layer(batch=2, heads=2, group=3, length=40, dim=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=draw)
    storage = make(batch, heads, length + 9, dim), make(batch, heads, length + 9, dim)
    # Views of longer storage, as a cache layer hands them out.
    return make(batch, heads * group, 1, dim), *(x[:, :, :length] for x in storage)


def slots_of(batch, selections, count, length, missing=0, seed=1):
    draw = torch.Generator().manual_seed(seed)
    lists = [torch.randperm(length, generator=draw)[:count] for _ in range(batch * selections)]
    slots = torch.stack(lists).view(batch, selections, count)
    if missing:
        slots[:, :, -missing:] = -1
    return slots


def expected(query, keys, values, slots, rest, scaling, softcap, sinks):
    """Output `[B, Q, D]` and weights `[B, Q, M]`, one query head at a time."""
    batch, query_heads, _, dim = query.shape
    outputs, weights = (
        torch.zeros(batch, query_heads, dim).double(),
        torch.zeros(batch, query_heads, slots.shape[2]).double(),
    )
    for row in range(batch):
        for head in range(query_heads):
            kv, chosen = head * keys.shape[1] // query_heads, slots[row, head * slots.shape[1] // query_heads]
            real = chosen >= 0
            logits = keys[row, kv, chosen.clamp(min=0)].double() @ query[row, head, 0].double() * scaling
            values_read = values[row, kv, chosen.clamp(min=0)].double()
            extra = torch.empty(0).double()
            if rest is not None:
                selection = head * slots.shape[1] // query_heads
                member = head % rest.scores.shape[2]
                extra = rest.scores[row, selection, member].double() * scaling
                values_read = torch.cat((values_read, rest.values[row, selection].double()))
            logits = torch.cat((logits, extra))
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if rest is not None:
                logits[len(chosen) :] += rest.log_counts[row, selection].double()
            logits[: len(chosen)][~real] = -torch.inf
            if sinks is not None:
                logits = torch.cat((logits, sinks[head : head + 1].double()))
            share = logits.softmax(0)[: len(values_read)]
            outputs[row, head] = share @ values_read
            weights[row, head] = share[: len(chosen)]
    return outputs, weights


def make_rest(selections, members, dim=8):
    draw = torch.Generator().manual_seed(5)
    return Rest(
        scores=torch.randn(2, selections, members, 5, generator=draw),
        values=torch.randn(2, selections, 5, dim, generator=draw),
        log_counts=torch.tensor([0.0, 3.0, 1.0, 17.0, 2.0]).log().expand(2, selections, 5),
    )


@pytest.mark.parametrize("selections", [2, 6])
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("with_rest", [False, True])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sink_logits": True}])
def test_output_and_weights(selections, missing, with_rest, extra):
    query, keys, values = layer()
    slots = slots_of(2, selections, 11, 40, missing)
    rest = make_rest(selections, 6 // selections) if with_rest else None
    sinks = torch.linspace(-1, 1, 6) if "sink_logits" in extra else None
    softcap = extra.get("softcap")
    reads = Reads(slots, missing == 0, rest)
    out, weights = expected(query, keys, values, slots, rest, 0.4, softcap, sinks)
    for top_k in (0, 3):
        result = attend(query, keys, values, reads, 0.4, top_k, 2, softcap, sinks)
        assert torch.allclose(result.output[:, :, 0].double(), out, atol=1e-5)
    mean = weights.view(2, selections, -1, 11).mean(2)
    mean[..., :2] = 0
    best = mean.topk(3)
    assert torch.allclose(result.weights.double(), best.values, atol=1e-6)
    assert torch.equal(result.slots.long(), slots.gather(2, best.indices))


@pytest.mark.parametrize("with_rest", [False, True])
def test_fewer_slots_than_weights_wanted_are_padded(with_rest):
    """11 slots, of which 2 are sinks and 3 are none."""
    query, keys, values = layer()
    slots = slots_of(2, 2, 11, 40, missing=3)
    rest = make_rest(2, 3) if with_rest else None
    result = attend(query, keys, values, Reads(slots, False, rest), 0.4, 16, 2)
    assert result.weights.shape == result.slots.shape == (2, 2, 16)
    assert (result.weights[..., :6] > 0).all() and not result.weights[..., 6:].any()
    assert (result.slots[..., 6:] == -1).all()
    assert torch.equal(result.slots[..., :6].sort().values.long(), slots[..., 2:8].sort().values)
    few = attend(query, keys, values, Reads(slots, False, rest), 0.4, 4, 2)
    assert torch.equal(few.weights, result.weights[..., :4]) and torch.equal(few.slots, result.slots[..., :4])


@pytest.mark.parametrize("selections", [2, 6])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sink_logits": True}])
def test_two_parts_joined_are_one_softmax(selections, extra):
    """What a GPU does in place of one softmax over both; a row without any slot is left to the rest alone."""
    query, keys, values = layer()
    slots = slots_of(2, selections, 11, 40, missing=3)
    slots[1, 0] = -1
    rest, sinks = make_rest(selections, 6 // selections), None
    if "sink_logits" in extra:
        sinks = torch.linspace(-1, 1, 6)
    out, _ = expected(query, keys, values, slots, rest, 0.4, extra.get("softcap"), sinks)
    joined = joined_with_rest(query, keys, values, Reads(slots, False, rest), 0.4, extra.get("softcap"), sinks)
    assert torch.allclose(joined[:, :, 0].double(), out, atol=1e-5)


def test_low_precision_is_no_worse_than_its_rounding():
    query, keys, values = layer()
    slots = slots_of(2, 2, 11, 40)
    low = [x.bfloat16() for x in (query, keys, values)]
    out, _ = expected(*low, slots, None, 0.4, None, None)
    result = attend(*low, Reads(slots, True), 0.4, 0, 2).output[:, :, 0].double()
    assert (result - out).abs().max() < 2e-2


@pytest.mark.parametrize("selections", [2, 6])
def test_the_mass_of_what_is_read(selections):
    query, keys, values = layer()
    slots = slots_of(2, selections, 11, 40, missing=2)
    bias = torch.zeros(2, 2, 40)
    bias[:, :, :5] = torch.finfo(torch.float32).min
    mass = attention_mass(query, keys, bias, slots, 0.4)
    for row in range(2):
        for head in range(6):
            logits = keys[row, head // 3].double() @ query[row, head, 0].double() * 0.4
            logits[:5] = -torch.inf
            chosen = slots[row, head * selections // 6]
            assert mass[row, head].item() == pytest.approx(
                float(logits.softmax(0)[chosen[chosen >= 0]].sum()), abs=1e-5
            )
