import pytest
import torch

from kvstitch.kernels.compact import compact


def ascending_slots(batch, heads, length, kept, seed=0):
    """Strictly ascending slots; the second head keeps fewer, the last keeps its first slots where they are."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.rand(batch, heads, length, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    slots[:, 1, kept - kept // 3 :] = -1
    slots[:, -1] = torch.arange(kept)
    slots[:, -1, -2:] = length - 2 + torch.arange(2)
    return slots


def by_loops(tensor, slots, fill):
    expected = tensor.clone()
    for row, head, place in torch.cartesian_prod(*(torch.arange(size) for size in slots.shape)).tolist():
        slot = int(slots[row, head, place])
        if slot >= 0:
            expected[row, head, place] = tensor[row, head, slot]
        elif fill is not None:
            expected[row, head, place] = fill
    return expected


def cache(batch, heads, length, dtype, dim):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(batch, heads, length, dim, generator=generator).to(dtype)
    positions = torch.arange(length).expand(batch, heads, length).contiguous()
    state = torch.randn(batch, heads, length, 2, 3, generator=generator)
    return [numbers, numbers * 2, positions, positions.int(), state], [None, 0.0, -1, -1, None]


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 16), (torch.bfloat16, 20), (torch.float16, 1)])
@pytest.mark.parametrize("block_bytes", [2**20, 64])
def test_reference_equals_loops(dtype, dim, block_bytes, monkeypatch):
    monkeypatch.setattr("kvstitch.kernels.compact.reference._BLOCK_BYTES", block_bytes)
    tensors, fills = cache(2, 3, 41, dtype, dim)
    slots = ascending_slots(2, 3, 41, 17)
    expected = [by_loops(tensor, slots, fill) for tensor, fill in zip(tensors, fills)]
    compact(tensors, slots, fills)
    for tensor, want in zip(tensors, expected):
        assert torch.equal(tensor, want)


def test_views_of_storage_are_written_through():
    storage = torch.randn(2, 3, 60, 8)
    slots = ascending_slots(2, 3, 40, 11)
    expected = storage.clone()
    expected[:, :, :40] = by_loops(storage[:, :, :40], slots, None)
    compact([storage[:, :, :40]], slots)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 1)])
def test_triton_equals_the_reference(dtype, dim, run_triton):
    tensors, fills = cache(2, 3, 301, dtype, dim)
    slots = ascending_slots(2, 3, 301, 203)
    moved, _, _ = run_triton(compact, [tensor.clone() for tensor in tensors], slots, fills).arguments
    compact(tensors, slots, fills, impl="reference")
    for found, want in zip(moved, tensors):
        assert torch.equal(found, want)


def test_nothing_to_do():
    compact([], torch.zeros(1, 2, 3, dtype=torch.long))
    tensor = torch.randn(1, 2, 5, 4)
    before = tensor.clone()
    compact([tensor], torch.zeros(1, 2, 0, dtype=torch.long))
    assert torch.equal(tensor, before)


def test_refusals():
    slots = ascending_slots(2, 3, 9, 4)
    with pytest.raises(ValueError, match=r"T >= 4, got \[2, 3, 3, 8\]"):
        compact([torch.zeros(2, 3, 3, 8)], slots)
    with pytest.raises(ValueError, match=r"\[2, 3\] and T >= 4, got \[2, 1, 9\]"):
        compact([torch.zeros(2, 1, 9)], slots)
    with pytest.raises(ValueError, match="one entry per tensor, got 2 for 1 tensors"):
        compact([torch.zeros(2, 3, 9)], slots, [None, -1])


def into_new_storage(tensors, slots):
    return [torch.full((*slots.shape, *tensor.shape[3:]), 77).to(tensor.dtype) for tensor in tensors]


def test_into_new_storage_equals_loops_and_leaves_the_old():
    tensors, fills = cache(2, 3, 41, torch.float32, 16)
    # Not contiguous by rows, as a view of one column is.
    tensors.append(torch.randn(2, 3, 41, 4, generator=torch.Generator().manual_seed(2))[..., 1:3])
    fills.append(None)
    slots, before = ascending_slots(2, 3, 41, 17), [tensor.clone() for tensor in tensors]
    out = into_new_storage(tensors, slots)
    compact(tensors, slots, fills, out)
    for tensor, untouched, fill, found in zip(tensors, before, fills, out):
        assert torch.equal(tensor, untouched)
        assert torch.equal(found, by_loops(tensor, slots, 0 if fill is None else fill)[:, :, :17])


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 300)])
def test_triton_into_new_storage_equals_the_reference(dtype, dim, run_triton):
    tensors, fills = cache(2, 3, 301, dtype, dim)
    slots = ascending_slots(2, 3, 301, 203)
    out = into_new_storage(tensors, slots)
    found = run_triton(compact, tensors, slots, fills, out).arguments[3]
    compact(tensors, slots, fills, out, impl="reference")
    for actual, want in zip(found, out):
        assert torch.equal(actual, want)


@pytest.mark.parametrize("slots", [[0, 2, 2], [0, 3, 1], [-1, 0, 1], [1, -1, 2]])
def test_slots_that_do_not_ascend_are_refused_in_place(slots):
    slots = torch.tensor([[[0, 1, 2], slots]])
    with pytest.raises(ValueError, match="those of row 0, head 1 do not"):
        compact([torch.zeros(1, 2, 5)], slots)
    compact([torch.zeros(1, 2, 5)], slots, check=False)
    with pytest.raises(ValueError, match="ascend strictly"):
        compact([torch.zeros(1, 2, 5)], slots, out=[torch.zeros(1, 2, 3)], check=True)


def test_out_of_another_shape_is_refused():
    slots, tensor = ascending_slots(2, 3, 9, 4), torch.zeros(2, 3, 9, 8)
    with pytest.raises(ValueError, match=r"torch.float32 \[2, 3, 4, 8\], got torch.float32 \[2, 3, 4\]"):
        compact([tensor], slots, out=[torch.zeros(2, 3, 4)])
    with pytest.raises(ValueError, match="out must have one entry per tensor, got 0 for 1 tensors"):
        compact([tensor], slots, out=[])
