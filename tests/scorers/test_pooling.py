import pytest
import torch

from kvstitch.scorers.pooling import average_pool, max_pool

X = torch.tensor([[[9.0, 1.0, 2.0, float("nan"), 6.0, 3.0]]])
VALID = torch.tensor([[[False, True, True, False, True, True]]])


@pytest.mark.parametrize("edges, expected", [("valid", [1.5, 3.0, 11 / 3, 4.5]), ("zero", [1.0, 3.0, 11 / 3, 3.0])])
def test_average_over_neighbours_in_the_surviving_sequence(edges, expected):
    torch.testing.assert_close(average_pool(X, VALID, 3, edges)[VALID], torch.tensor(expected))


def test_maximum_over_neighbours_in_the_surviving_sequence():
    assert max_pool(X, VALID, 3)[VALID].tolist() == [2, 6, 6, 6]
    assert max_pool(-X, VALID, 3)[VALID].tolist() == [-1, -1, -2, -3]


def test_a_kernel_wider_than_the_sequence():
    torch.testing.assert_close(average_pool(X, VALID, 9, "valid")[VALID], torch.full((4,), 3.0))
    assert max_pool(X, VALID, 9)[VALID].tolist() == [6, 6, 6, 6]


def test_a_kernel_of_one_changes_nothing():
    assert average_pool(X, VALID, 1, "valid") is X
    assert max_pool(X, VALID, 1) is X
