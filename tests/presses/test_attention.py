"""Attention of a decode step against float64, in room that is used again and full of rubbish."""

import pytest
import torch

from kvstitch.presses.attention import Scratch, decode_attention

BATCH, HEADS, GROUP, DIM = 2, 3, 4, 16


def reference(query, keys, values, bias, scaling, softcap, sinks):
    """One head after the other, in float64."""
    out = torch.empty(BATCH, HEADS * GROUP, 1, DIM, dtype=torch.float64)
    for row in range(BATCH):
        for head in range(HEADS * GROUP):
            kv = head // GROUP
            logits = keys[row, kv].double() @ query[row, head, 0].double() * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias[row, kv].double()
            if sinks is not None:
                logits = torch.cat((logits, sinks[head : head + 1].double()))
            weights = logits.softmax(0)[: keys.shape[2]]
            out[row, head, 0] = weights @ values[row, kv].double()
    return out


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_float64_with_room_that_is_used_again(dtype, tolerance, softcap, with_sinks, with_bias):
    draw = torch.Generator().manual_seed(0)
    scratch = Scratch()
    # Longer, shorter, and longer than the room that was there.
    for length in (37, 11, 1500):
        query = torch.randn(BATCH, HEADS * GROUP, 1, DIM, generator=draw).to(dtype) * 2
        # The front of larger storage, as in a cache.
        storage = [torch.randn(BATCH, HEADS, length + 9, DIM, generator=draw).to(dtype) for _ in range(2)]
        keys, values = (tensor[:, :, :length] for tensor in storage)
        bias = None
        if with_bias:
            empty = torch.rand(BATCH, HEADS, length, generator=draw) < 0.3
            bias = empty.to(dtype) * torch.finfo(dtype).min
        sinks = torch.randn(HEADS * GROUP, generator=draw) if with_sinks else None
        got = decode_attention(query, keys, values, bias, 0.25, softcap, sinks, scratch)
        assert got.dtype == dtype
        assert (got.double() - reference(query, keys, values, bias, 0.25, softcap, sinks)).abs().max() < tolerance
        alone = decode_attention(query, keys, values, bias, 0.25, softcap, sinks)
        assert torch.equal(got, alone)
        for flat in scratch._flat.values():
            flat.fill_(torch.nan)
