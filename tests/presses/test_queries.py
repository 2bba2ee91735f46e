"""The ring holds the newest queries at their true positions, and the sums hold every query once."""

import pytest
import torch

from kvstitch.presses.queries import QueryMemory
from kvstitch.views import Needs, Rotary

ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))


def tokens(count, batch=2, heads=3, pad=(0, 2)):
    """Queries `[B, Q, N, 4]` before RoPE, positions `[B, N]` with `pad` leading empty entries a row."""
    plain = torch.randn(batch, heads, count, 4, generator=torch.Generator().manual_seed(count))
    positions = torch.stack([torch.arange(count) - p for p in pad]).clamp(min=-1)
    return plain, positions


def feed(memory, plain, positions, sizes):
    rotated = ROTARY.rotate(plain, positions.clamp(min=0))
    start = 0
    for size in sizes:
        memory.remember(rotated[:, :, start : start + size], positions[:, start : start + size])
        start += size
    return rotated[:, :, :start], positions[:, :start]


@pytest.mark.parametrize("sizes", [[40], [1] * 23, [10, 1, 1, 7, 1, 5], [3, 40, 1, 1], [8], [9, 8, 7]])
def test_window_is_the_newest_queries_in_order(sizes):
    memory = QueryMemory(Needs(queries=8), ROTARY)
    rotated, positions = feed(memory, *tokens(sum(sizes)), sizes)
    window = memory.window()
    held = min(8, sum(sizes))
    assert torch.equal(window.rotated[:, :, -held:], rotated[:, :, -held:])
    assert torch.equal(window.positions[:, -held:], positions[:, -held:])
    assert not window.valid[:, : 8 - held].any()


def test_fewer_tokens_than_the_window_leaves_the_rest_empty():
    memory = QueryMemory(Needs(queries=8), ROTARY)
    feed(memory, *tokens(3, pad=(0, 0)), [1, 1, 1])
    assert memory.window().positions.tolist() == [[-1] * 5 + [0, 1, 2]] * 2
    assert memory.window().last(2).positions.tolist() == [[1, 2]] * 2


def test_unrotated_undoes_rope_at_each_querys_own_position():
    memory = QueryMemory(Needs(queries=8), ROTARY)
    plain, positions = tokens(30)
    feed(memory, plain, positions, [20, *[1] * 10])
    assert torch.allclose(memory.window().unrotated(ROTARY), plain[:, :, -8:], atol=1e-5)


@pytest.mark.parametrize("sizes", [[300], [1] * 300, [100, *[1] * 200], [70, 70, *[1] * 100, 60], [63, 1, 64, 1, 171]])
@pytest.mark.parametrize("look_at", [(), (5, 150), range(0, 300, 7)])
def test_sums_hold_every_query_once(sizes, look_at):
    memory = QueryMemory(Needs(queries=8, statistics=True), ROTARY)
    plain, positions = tokens(sum(sizes))
    rotated = ROTARY.rotate(plain, positions.clamp(min=0))
    start = 0
    for size in sizes:
        memory.remember(rotated[:, :, start : start + size], positions[:, start : start + size])
        start += size
        if start in look_at:
            memory.statistics()
    statistics = memory.statistics()
    counted = positions >= 4
    expected = torch.where(counted[:, None, :, None], ROTARY.to_complex(plain).to(torch.complex128), 0)
    assert statistics.count.tolist() == counted.sum(1).tolist()
    assert torch.allclose(statistics.total, expected.sum(2).to(torch.complex64), atol=1e-3)
    assert torch.allclose(statistics.modulus, expected.abs().sum(2).float(), atol=1e-3)
    assert torch.allclose(statistics.square, expected.abs().square().sum(2).float(), atol=1e-2)


def test_rows_follow_batch_operations():
    memory = QueryMemory(Needs(queries=8, statistics=True), ROTARY)
    feed(memory, *tokens(20), [20])
    before = memory.window(), memory.statistics()
    memory.map_rows(lambda tensor: tensor.index_select(0, torch.tensor([1, 1, 0])))
    for row, source in enumerate((1, 1, 0)):
        assert torch.equal(memory.window().rotated[row], before[0].rotated[source])
        assert torch.equal(memory.statistics().total[row], before[1].total[source])


def test_a_roll_back_is_refused_once_queries_are_remembered():
    for needs in (Needs(queries=8), Needs(statistics=True)):
        memory = QueryMemory(needs, ROTARY)
        memory.require_nothing_forgotten()
        feed(memory, *tokens(30), [20])
        with pytest.raises(RuntimeError, match="cannot be rolled back under a scorer"):
            memory.require_nothing_forgotten()


def test_nothing_is_kept_when_nothing_is_needed():
    memory = QueryMemory(Needs(), None)
    feed(memory, *tokens(30), [30])
    assert memory.window() is None and memory.statistics() is None and memory._queries is None
