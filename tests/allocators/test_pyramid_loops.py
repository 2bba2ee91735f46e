"""Pyramid against its rule layer by layer, in exact fractions, and against a pick of slots written with loops."""

import math
import random
from fractions import Fraction

import pytest
import torch

from kvstitch.allocators import GlobalTopK, Pyramid

SLOTS = 61


def layer_budgets(keep, layers, beta, protected):
    """PyramidKV: a line from 2 c - c / beta in the first layer down to c / beta in the last, c being what is not protected.

    Whole slots: layers above the mean are rounded down, and each one's mirror image gets what the pair is short of 2 c.
    """
    if layers == 1:
        return [keep]
    reserved = min(keep, protected)
    mean = keep - reserved
    last = min(mean, max(1, mean // beta))
    budgets = [None] * layers
    for layer in range(layers):
        line = Fraction(2 * mean - last) + layer * Fraction(last - (2 * mean - last), layers - 1)
        if 2 * layer < layers - 1:
            budgets[layer] = reserved + math.floor(line)
            budgets[layers - 1 - layer] = reserved + 2 * mean - math.floor(line)
        elif 2 * layer == layers - 1:
            assert line == mean
            budgets[layer] = keep
    return budgets


@pytest.mark.parametrize("seed", range(5))
def test_layer_budgets_over_drawn_cases(seed):
    draw = random.Random(seed)
    for _ in range(60):
        layers, beta = draw.randint(1, 40), draw.choice([1, 2, 3, 7, 20, 1000])
        inner = GlobalTopK(num_sinks=draw.randint(0, 6), num_recent=draw.randint(0, 40))
        keeps = [draw.choice([draw.randint(1, 8), draw.randint(1, 60), draw.randint(1, 5000)]) for _ in range(3)]
        pyramid = Pyramid(beta=beta, allocator=inner)
        shares = [pyramid.layer_keep(torch.tensor(keeps), layer, layers).tolist() for layer in range(layers)]
        for row, keep in enumerate(keeps):
            expected = layer_budgets(keep, layers, beta, inner.num_sinks + inner.num_recent)
            assert [share[row] for share in shares] == expected
            assert sum(expected) == layers * keep


def test_an_even_number_of_layers_by_hand():
    """c = 22 besides the 6 protected, beta 4: from 39 down to 5, 34 / 5 = 6.8 a layer, no layer at the mean.

    39, 32.2, 25.4 are rounded down; 44 less each of them is what their mirror images get.
    """
    pyramid = Pyramid(beta=4, allocator=GlobalTopK(num_sinks=2, num_recent=4))
    shares = [pyramid.layer_keep(torch.tensor([28]), layer, 6).item() - 6 for layer in range(6)]
    assert shares == [39, 32, 25, 19, 12, 5]


def test_what_a_layer_cannot_use_goes_to_the_lowest_that_can():
    """c = 22 besides 6, beta 4, shares 45, 38, 31, 25, 18, 11: layers of 40 are 5 short, and the next has room for 2 of them."""
    pyramid = Pyramid(beta=4, allocator=GlobalTopK(num_sinks=2, num_recent=4))
    held = torch.tensor([40, 40, 40, 40, 40, 40])[:, None]
    assert pyramid.layer_keeps(torch.tensor([28]), held).flatten().tolist() == [40, 40, 34, 25, 18, 11]


@pytest.mark.parametrize("seed", range(3))
def test_the_total_is_exact_wherever_layers_hold_so_much(seed):
    draw = random.Random(seed)
    for _ in range(60):
        layers = draw.randint(1, 12)
        pyramid = Pyramid(beta=draw.choice([1, 2, 20]), allocator=GlobalTopK(num_sinks=2, num_recent=3))
        keep = [draw.randint(1, 60) for _ in range(2)]
        held = [[draw.randint(0, 90) for _ in range(2)] for _ in range(layers)]
        keeps = pyramid.layer_keeps(torch.tensor(keep), torch.tensor(held)).tolist()
        for row in range(2):
            have, given = [counts[row] for counts in held], [shares[row] for shares in keeps]
            own = [pyramid.layer_keep(torch.tensor([keep[row]]), layer, layers).item() for layer in range(layers)]
            # Loop: each layer takes its share if it can, then the lowest take what is left.
            expected = [min(pair) for pair in zip(own, have)]
            left = layers * keep[row] - sum(expected)
            for layer in range(layers):
                more = min(left, have[layer] - expected[layer])
                expected[layer], left = expected[layer] + more, left - more
            assert given == expected and sum(given) == min(layers * keep[row], sum(have))


def layer_slots(loops, allocator, scores, present, keep):
    """What one head of one layer keeps: all of it if it fits, else protected slots and the best of the others."""
    keep = min(keep, len(present))
    must = loops.protected(present, keep, allocator.num_sinks, allocator.num_recent, allocator.must_priority)
    rest = loops.best_first(scores, [slot for slot in present if slot not in must])
    return sorted(must | set(rest[: keep - len(must)]))


@pytest.mark.parametrize("layers", [2, 5, 6])
@pytest.mark.parametrize("keep", [(3, 8), (12, 30), (33, 45), (61, 70)])
@pytest.mark.parametrize("priority", ["sink", "suffix"])
def test_slots_of_every_layer_row_and_head(make_view, loops, layers, keep, priority):
    holes = torch.zeros(2, 2, SLOTS, dtype=torch.bool)
    holes[1, :, :13] = True
    holes[0, 1, 20:24] = True
    inner = GlobalTopK(num_sinks=2, num_recent=4, must_priority=priority)
    pyramid = Pyramid(beta=5, allocator=inner)
    views = [make_view(heads=2, slots=SLOTS, holes=holes, seed=layer) for layer in range(layers)]
    draw = torch.Generator().manual_seed(sum(keep))
    # Eighths, so that there are ties, and NaN for one of them.
    scores = [(torch.rand(2, 2, SLOTS, generator=draw) * 8).round() / 8 for _ in views]
    scores = [torch.where(score == 0.5, torch.nan, score) for score in scores]
    keeps = [pyramid.layer_keep(torch.tensor(keep), layer, layers) for layer in range(layers)]
    selections = pyramid.allocate_layers(views, scores, keeps, [{} for _ in views])
    for row, budget in enumerate(keep):
        budgets = layer_budgets(budget, layers, 5, 6)
        for layer, (view, score, selection) in enumerate(zip(views, scores, selections)):
            for head in range(2):
                present = torch.where(view.valid[row, head])[0].tolist()
                expected = layer_slots(loops, inner, score[row, head].tolist(), present, budgets[layer])
                kept = selection.slots[row, head]
                assert kept[kept >= 0].tolist() == expected
