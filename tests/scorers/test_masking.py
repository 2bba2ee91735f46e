import torch

from kvstitch.scorers.masking import PackedOrder, softmax_over, without_empty

VALID = torch.tensor([[[False, True, True, False, True], [True, True, True, True, True]]])
NAN = float("nan")


def test_empty_slots_are_replaced_not_multiplied():
    x = torch.tensor([[[[NAN], [1.0], [2.0], [float("inf")], [3.0]]] * 2]).bfloat16()
    result = without_empty(x.nan_to_num(posinf=9.0).where(VALID[..., None], x), VALID)
    assert result.dtype == torch.float32
    assert result[0, 0, :, 0].tolist() == [0, 1, 2, 0, 3]


def test_softmax_over_members_only():
    logits = torch.tensor([[[NAN, 0.0, 0.0, NAN, 0.0], [1.0] * 5]])
    result = softmax_over(logits, VALID)
    torch.testing.assert_close(result, torch.tensor([[[0, 1 / 3, 1 / 3, 0, 1 / 3], [0.2] * 5]]))
    assert softmax_over(logits, torch.zeros_like(VALID)).tolist() == torch.zeros(1, 2, 5).tolist()


def test_packing_closes_the_holes_and_unpacking_opens_them():
    x = torch.tensor([[[NAN, 1.0, 2.0, NAN, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]]])
    order = PackedOrder.of(VALID)
    packed = order.pack(x, -1.0)
    assert packed.tolist() == [[[1, 2, 3, -1, -1], [1, 2, 3, 4, 5]]]
    assert order.count.tolist() == [[[3], [5]]]
    unpacked = order.unpack(packed)
    assert torch.equal(unpacked[VALID], x[VALID])
    assert unpacked.isfinite().all()
