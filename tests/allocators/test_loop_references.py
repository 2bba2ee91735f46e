"""FixedSegments and HeadAdaptive against loops over Python numbers, protected slots, padding and history included."""

import pytest
import torch

from kvstitch.allocators import FixedSegments, HeadAdaptive

SLOTS = 61


def draw(shape, seed, rounded=False):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    if rounded:
        # Ties, and a few NaN.
        values = (values * 8).round() / 8
        values = torch.where(values == 0.5, torch.nan, values)
    return values


# -- fixed segments -----------------------------------------------------------------------------------------------


def fixed_event(loops, allocator, scores, usage, credit, keep):
    """Slots, credit of the kept slots and quotas of one head without empty slots."""
    mass, updated = loops.mass(usage, credit, allocator.credit_decay, allocator.credit_mix)
    starts = range(0, len(scores), allocator.segment_tokens)
    segments = [range(start, min(start + allocator.segment_tokens, len(scores))) for start in starts]
    must = loops.protected(
        list(range(len(scores))), keep, allocator.num_sinks, allocator.num_recent, allocator.must_priority
    )
    weights = [float(len(s)) if allocator.quota == "length" else sum(mass[slot] for slot in s) for s in segments]
    lengths, inside = [len(s) for s in segments], [len(must & set(s)) for s in segments]
    quotas = loops.quotas(lengths, weights, inside, keep, allocator.min_keep_tokens)
    kept = []
    for segment, quota in zip(segments, quotas):
        first = [slot for slot in segment if slot in must]
        rest = loops.best_first(scores, [slot for slot in segment if slot not in must])
        kept += (first + rest)[:quota]
    kept.sort()
    return kept, [updated[slot] for slot in kept], quotas


@pytest.mark.parametrize("quota", ["mass", "length"])
@pytest.mark.parametrize("segment_tokens", [1, 7, 16, 100])
@pytest.mark.parametrize("floor, sinks, recent", [(1, 3, 6), (4, 0, 0), (0, 5, 9)])
def test_fixed_segments_over_three_events(loops, quota, segment_tokens, floor, sinks, recent):
    allocator = FixedSegments(
        segment_tokens=segment_tokens, quota=quota, min_keep_tokens=floor, num_sinks=sinks, num_recent=recent
    )
    keep, slots = [18, 33], SLOTS
    credit, history = None, [[[] for _ in range(2)] for _ in range(2)]
    for event in range(3):
        scores, usage = draw((2, 2, slots), event, rounded=True), draw((2, 2, slots), 10 + event) ** 4
        for row in range(2):
            own = None if credit is None else credit[row : row + 1]
            result = allocator.select(scores[row : row + 1], usage[row : row + 1], keep[row], own)
            for head in range(2):
                expected, old, quotas = fixed_event(
                    loops,
                    allocator,
                    scores[row, head].tolist(),
                    usage[row, head].tolist(),
                    history[row][head],
                    keep[row],
                )
                assert result.slots[0, head].tolist() == expected
                assert [q for q in result.quotas[0, head].tolist() if q >= 0] == quotas
                torch.testing.assert_close(result.credit[0, head], torch.tensor(old), atol=1e-7, rtol=1e-5)
                history[row][head] = old
        width = max(keep)
        credit = torch.zeros(2, 2, width)
        for row in range(2):
            for head in range(2):
                # A row that keeps fewer is filled up with slots without history.
                history[row][head] += [0.0] * (width - keep[row])
                credit[row, head] = torch.tensor(history[row][head])
        slots = width + 20


def test_fixed_segments_count_valid_slots_only(loops):
    """Segments of 7 valid slots, wherever empty ones stand."""
    allocator = FixedSegments(segment_tokens=7, num_sinks=2, num_recent=4)
    scores, usage = draw((1, 2, SLOTS), 1), draw((1, 2, SLOTS), 2)
    valid = draw((1, 2, SLOTS), 3) < 0.7
    result = allocator.select(scores, usage, 20, None, valid)
    for head in range(2):
        present = torch.where(valid[0, head])[0].tolist()
        packed = [[tensor[0, head, slot].item() for slot in present] for tensor in (scores, usage)]
        kept, old, quotas = fixed_event(loops, allocator, *packed, [], 20)
        assert result.slots[0, head].tolist() == [present[place] for place in kept]
        assert [q for q in result.quotas[0, head].tolist() if q >= 0] == quotas
        torch.testing.assert_close(result.credit[0, head], torch.tensor(old), atol=1e-7, rtol=1e-5)


# -- head adaptive ------------------------------------------------------------------------------------------------


def shared_budget(loops, allocator, scores, present, keep):
    """Slots of each head of one row."""
    heads = range(len(scores))
    guarded = []
    for head in heads:
        room = min(keep, len(present[head]))
        must = loops.protected(present[head], room, allocator.num_sinks, allocator.num_recent, allocator.must_priority)
        own = max(min(int(allocator.alpha * keep + 1e-9), len(present[head])), len(must))
        rest = loops.best_first(scores[head], [slot for slot in present[head] if slot not in must])
        guarded.append(must | set(rest[: own - len(must)]))
    total = min(keep * len(scores), sum(map(len, present)))
    others = [(head, slot) for head in heads for slot in present[head] if slot not in guarded[head]]
    value = lambda at: scores[at[0]][at[1]]
    others.sort(key=lambda at: (value(at) != value(at), -value(at), at))
    for head, slot in others[: total - sum(map(len, guarded))]:
        guarded[head].add(slot)
    return [sorted(slots) for slots in guarded]


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.65, 1.0])
@pytest.mark.parametrize("keep", [(1, 4), (9, 14), (15, 22), (45, 50)])
@pytest.mark.parametrize("priority", ["sink", "suffix"])
@pytest.mark.parametrize("rounded", [False, True])
def test_heads_share_one_budget_after_their_protected_slots(make_view, loops, alpha, keep, priority, rounded):
    holes = torch.zeros(2, 3, SLOTS, dtype=torch.bool)
    holes[1, :, :13] = True
    view = make_view(slots=SLOTS, holes=holes)
    # The second head scores higher, so that it takes from the others.
    scores = draw((2, 3, SLOTS), 5, rounded) * torch.tensor([1.0, 3.0, 0.5])[:, None]
    allocator = HeadAdaptive(alpha=alpha, num_sinks=3, num_recent=6, must_priority=priority)
    selection = allocator.allocate(view, scores, torch.tensor(keep), {})
    for row, budget in enumerate(keep):
        present = [torch.where(view.valid[row, head])[0].tolist() for head in range(3)]
        expected = shared_budget(loops, allocator, scores[row].tolist(), present, budget)
        kept = [slots[slots >= 0].tolist() for slots in selection.slots[row]]
        assert kept == expected
        assert selection.details["counts"][row].tolist() == [len(slots) for slots in expected]
