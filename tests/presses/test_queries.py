"""The ring holds the newest queries at their true positions, and the sums hold every query once."""

import pytest
import torch

from kvstitch.presses.queries import QueryMemory
from kvstitch.presses.shared_results import SharedResults
from kvstitch.views import Needs, QueryWindow, Rotary

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


SPACED = Needs(queries=3, spaced_queries=20, query_step=4)


@pytest.mark.parametrize("tokens_back, step", [(17, 4), (20, 4), (6, 9), (1, 5), (9, 3)])
def test_any_stretch_and_distance(tokens_back, step):
    memory = QueryMemory(Needs(spaced_queries=tokens_back, query_step=step), ROTARY)
    plain, positions = tokens(60, pad=(0, 0))
    for column in range(60):
        memory.remember(plain[:, :, column : column + 1], positions[:, column : column + 1])
        columns = on_the_grid(positions[0, : column + 1], memory._needs)
        spaced = in_order(memory.spaced())
        assert spaced.positions[0][spaced.valid[0]].tolist() == columns
        assert torch.equal(spaced.rotated[0][:, spaced.valid[0]], plain[0][:, columns])


def on_the_grid(positions, needs):
    """The newest column of one row, and those before it that are to be held."""
    newest, count = int(positions[-1]), -(-needs.spaced_queries // needs.query_step)
    near = [column for column, place in enumerate(positions.tolist()) if place > newest - needs.spaced_queries]
    held = [
        c for c in near if positions[c] >= 0 and ((positions[c] + 1) % needs.query_step == 0 or c == len(positions) - 1)
    ]
    return held[-count:]


def in_order(window):
    order = window.positions.argsort(dim=1)
    rotated = torch.stack([window.rotated[row][:, order[row]] for row in range(len(order))])
    return QueryWindow(rotated, window.positions.gather(1, order))


def require_spaced(memory, rotated, positions):
    """Against all queries so far, by columns."""
    spaced = in_order(memory.spaced())
    assert spaced.positions.shape == (2, 5)
    whole = QueryWindow(rotated, positions).spaced(memory._needs.query_step, memory._needs.spaced_queries)
    for row in range(2):
        columns, held = on_the_grid(positions[row], memory._needs), spaced.valid[row]
        assert spaced.positions[row][held].tolist() == positions[row][columns].tolist()
        assert torch.equal(spaced.rotated[row][:, held], rotated[row][:, columns])
        assert whole.positions[row][whole.valid[row]].tolist() == positions[row][columns].tolist()


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("sizes", [[40], [1] * 43, [10, 1, 1, 7, 1, 5], [3, 40, 1, 1], [1], [2, 5], [9, 8, 7, 1]])
def test_spaced_queries_are_those_of_a_whole_window(sizes, statistics):
    """Looked at after every forward or only at the end; padding shifts a row's columns, not its positions."""
    needs = Needs(queries=3, spaced_queries=20, query_step=4, statistics=statistics)
    watched, unwatched = QueryMemory(needs, ROTARY), QueryMemory(needs, ROTARY)
    plain, positions = tokens(sum(sizes))
    rotated, start = ROTARY.rotate(plain, positions.clamp(min=0)), 0
    for size in sizes:
        for memory in (watched, unwatched):
            memory.remember(rotated[:, :, start : start + size], positions[:, start : start + size])
        start += size
        if int(positions[:, start - 1].amin()) >= 0:
            require_spaced(watched, rotated[:, :, :start], positions[:, :start])
    one, other = in_order(watched.spaced()), in_order(unwatched.spaced())
    assert torch.equal(one.positions, other.positions)
    held = one.valid[:, None, :, None]
    assert torch.equal(one.rotated * held, other.rotated * held)
    if sum(sizes) >= 3:
        assert torch.equal(watched.window().positions, positions[:, -3:])


def test_right_padding_hides_no_query():
    memory = QueryMemory(SPACED, ROTARY)
    plain, _ = tokens(70)
    positions = torch.stack([torch.arange(70), torch.where(torch.arange(70) < 30, torch.arange(70), -1)])
    rotated = ROTARY.rotate(plain, positions.clamp(min=0))
    memory.remember(rotated, positions)
    spaced = in_order(memory.spaced())
    assert spaced.positions[1].tolist() == [11, 15, 19, 23, 27]
    assert torch.equal(spaced.rotated[1], rotated[1, :, 11:28:4])


@pytest.mark.parametrize("queries, held", [(20, 20), (25, 25), (3, 16 + 6)])
def test_what_the_ring_holds_is_not_held_twice(queries, held):
    memory = QueryMemory(Needs(queries=queries, spaced_queries=20, query_step=4), ROTARY)
    plain, positions = tokens(60, pad=(0, 0))
    for start in range(0, 60, 3):
        memory.remember(plain[:, :, start : start + 3], positions[:, start : start + 3])
        require_spaced(memory, plain[:, :, : start + 3], positions[:, : start + 3])
    own = [memory._queries] + ([] if memory._spaced is None else [memory._spaced._queries])
    assert sum(tensor.shape[2] for tensor in own) == held


def test_a_ring_made_in_inference_mode_goes_on_outside():
    memory = QueryMemory(SPACED, ROTARY)
    plain, positions = tokens(60, pad=(0, 0))
    with torch.inference_mode():
        memory.remember(plain[:, :, :50].clone(), positions[:, :50].clone())
    for column in range(50, 60):
        memory.remember(plain[:, :, column : column + 1], positions[:, column : column + 1])
    require_spaced(memory, plain, positions)


def test_the_ring_is_no_longer_than_it_must_be():
    memory = QueryMemory(Needs(spaced_queries=16, query_step=200_000), ROTARY)
    feed(memory, *tokens(30), [30])
    assert memory._queries.shape[2] == 16


def test_rows_follow_batch_operations():
    memory = QueryMemory(Needs(queries=8, spaced_queries=16, query_step=4, statistics=True), ROTARY)
    feed(memory, *tokens(20), [20])
    before, spaced = (memory.window(), memory.statistics()), memory.spaced()
    memory.map_rows(lambda tensor: tensor.index_select(0, torch.tensor([1, 1, 0])))
    for row, source in enumerate((1, 1, 0)):
        assert torch.equal(memory.window().rotated[row], before[0].rotated[source])
        assert torch.equal(memory.spaced().rotated[row], spaced.rotated[source])
        assert torch.equal(memory.statistics().total[row], before[1].total[source])


def test_a_roll_back_is_refused_once_queries_are_remembered():
    for needs in (Needs(queries=8), Needs(statistics=True), SPACED):
        memory = QueryMemory(needs, ROTARY)
        memory.require_nothing_forgotten()
        feed(memory, *tokens(30), [20])
        with pytest.raises(RuntimeError, match="cannot be rolled back under a scorer"):
            memory.require_nothing_forgotten()


def test_nothing_is_kept_when_nothing_is_needed():
    memory = QueryMemory(Needs(), None)
    feed(memory, *tokens(30), [30])
    assert memory.window() is None and memory.statistics() is None and memory._queries is None


def test_needs_unite_to_the_least_that_satisfies_both():
    both = Needs(queries=4) | Needs(spaced_queries=32, query_step=8)
    assert both == Needs(queries=4, spaced_queries=32, query_step=8)
    assert both | Needs(spaced_queries=64, query_step=8) == Needs(queries=4, spaced_queries=64, query_step=8)
    with pytest.raises(ValueError, match="one distance only, and every 4 and 8 were asked for"):
        both | Needs(spaced_queries=8, query_step=4)


@pytest.mark.parametrize("needs", [SPACED, Needs(queries=7, statistics=True)])
def test_layers_that_share_give_what_each_gives_alone(needs):
    """The second layer finds the positions of the first; one whose rows were turned does not, and is right as well."""
    shared = SharedResults()
    layers = [QueryMemory(needs, ROTARY, shared) for _ in range(3)]
    alone = [QueryMemory(needs, ROTARY) for _ in range(3)]
    plain, positions = tokens(90)
    rotated, start = ROTARY.rotate(plain, positions.clamp(min=0)), 0
    for size in [40, 1, 1, 17, *[1] * 20, 11]:
        arriving = positions[:, start : start + size].clone()
        for number, memory in enumerate(layers + alone):
            memory.remember((number % 3 + 1) * rotated[:, :, start : start + size], arriving)
        start += size
        if start == 59:
            for memory in (layers[1], alone[1]):
                memory.map_rows(lambda tensor: tensor.flip(0))
        for one, other in zip(layers, alone):
            require_same(one, other)
    views = [memory.spaced() or memory.window() for memory in (layers[0], layers[2])]
    if needs is SPACED:
        assert views[0].positions is views[1].positions


def require_same(one, other):
    for window, expected in ((one.window(), other.window()), (one.spaced(), other.spaced())):
        assert (window is None) == (expected is None)
        if window is not None:
            assert torch.equal(window.positions, expected.positions)
            assert torch.equal(window.rotated, expected.rotated)
    sums, expected = one.statistics(), other.statistics()
    assert expected is None or all(torch.equal(a, b) for a, b in zip(vars(sums).values(), vars(expected).values()))


def test_results_are_shared_by_the_object_and_not_by_the_value():
    calls = []

    def count(tensor, number):
        calls.append(number)
        return tensor + number

    shared, one = SharedResults(), torch.ones(2)
    assert shared(count, one, 1) is shared(count, one, 1) and calls == [1]
    shared(count, one.clone(), 1)
    shared(count, one, 2)
    assert calls == [1, 1, 2]
