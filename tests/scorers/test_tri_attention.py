import math
from dataclasses import replace

import pytest
import torch

from kvstitch.scorers import TOVA, TriAttention, TriAttentionStatistics
from kvstitch.views import Needs, QueryStatistics, Rotary


def query_model(story, b, q):
    """Mean query and mean modulus per frequency of a query head, over all queries of the row but the first four."""
    seen = story.complex(story.queries[b, q, 4 : story.lengths[b]])
    return seen.mean(dim=0), seen.abs().mean(dim=0)


def raw_by_offsets(story, b, q, place, offsets):
    """The published form: un-rotated key, one cosine for each frequency and distance. One number per distance."""
    mean, modulus = query_model(story, b, q)
    key = story.complex(story.keys[b, q // 3, place])
    phase = torch.angle(mean * key.conj())
    weight = story.of_planes(story.rotary.attention_scaling**2, 1.0)
    frequencies = story.of_planes(story.rotary.inverse_frequencies, 0.0)
    amplitude, spread = weight * mean.abs() * key.abs(), (weight * (modulus - mean.abs()) * key.abs()).sum()
    distances = [story.lengths[b] + e - place for e in offsets]
    return [float((amplitude * torch.cos(frequencies * d + phase)).sum() + spread) for d in distances]


def raw_by_rotation(story, b, q, place, offsets):
    """The same by definition of RoPE: the mean query put at each future position, times the key at its own."""
    mean, modulus = query_model(story, b, q)
    key = story.keys[b, q // 3, place]
    weight = story.of_planes(story.rotary.attention_scaling**2, 1.0)
    spread = float((weight * (modulus - mean.abs()) * story.complex(key).abs()).sum())
    # The mean of the complex view is the complex view of the mean.
    plain = story.queries[b, q, 4 : story.lengths[b]].mean(dim=0, keepdim=True)
    turned_key = story.turned(key[None], shift=place)[0]
    return [float(story.turned(plain, shift=story.lengths[b] + e)[0] @ turned_key) + spread for e in offsets]


def scores_by_loops(story, scorer, raw):
    offsets = [2**i for i in range(int(math.log2(scorer.offset_max)) + 1)]
    pick = {"mean": lambda x: sum(x) / len(x), "max": max}

    def reference(b, h):
        normal = []
        for q in range(3 * h, 3 * h + 3):
            one = torch.tensor(
                [pick[scorer.aggregate](raw(story, b, q, p, offsets)) for p in story.kept_places(b, h)],
                dtype=torch.float64,
            )
            normal.append((one - one.mean()) / one.std(unbiased=False).clamp(min=1e-6))
        return [pick[scorer.gqa]([float(one[i]) for one in normal]) for i in range(len(normal[0]))]

    return reference


@pytest.mark.parametrize("raw", [raw_by_offsets, raw_by_rotation], ids=["offsets", "rotation"])
@pytest.mark.parametrize("aggregate, gqa, offset_max", [("mean", "max", 65536), ("max", "mean", 70)])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"interleaved": True},
        {"attention_scaling": 1.3},
        {"rotated_dims": 4, "attention_scaling": 1.3},
        {"rotated_dims": 2, "interleaved": True},
    ],
    ids=["half", "interleaved", "scaled", "partial", "partial_interleaved"],
)
def test_baked_form_is_the_published_one(make_story, assert_scores, raw, aggregate, gqa, offset_max, rope):
    story = make_story(lengths=(17, 12), **rope)
    scorer = TriAttention(aggregate=aggregate, gqa=gqa, offset_max=offset_max, debias=False)
    view = story.view()
    # Scores pass through zero.
    assert_scores(scorer.score(view), story, view, scores_by_loops(story, scorer, raw), atol=2e-5)


def one_frequency(count, total, modulus, square):
    return QueryStatistics(
        torch.tensor([count]),
        torch.tensor([[[total]]], dtype=torch.complex64),
        torch.tensor([[[modulus]]]),
        torch.tensor([[[square]]]),
    )


QUARTER = Rotary(torch.tensor([math.pi / 2], dtype=torch.float64))


def test_by_hand(make_view):
    # Every query was 1; next position 3, distance 1: it will point at i^4 = 1. Keys 1, i, -1 give 1, 0, -1.
    view = make_view([[1, 0], [0, 1], [-1, 0]], rotary=QUARTER, statistics=one_frequency(100, 100 + 0j, 100.0, 100.0))
    scores = TriAttention(offset_max=1).score(view)
    torch.testing.assert_close(scores, torch.tensor([[[1.0, 0.0, -1.0]]]) * math.sqrt(1.5))


def test_queries_without_a_direction_leave_the_moduli(make_view):
    view = make_view([[1, 0], [0, 2], [-3, 0]], rotary=QUARTER, statistics=one_frequency(100, 0j, 100.0, 100.0))
    torch.testing.assert_close(TriAttention().score(view), torch.tensor([[[-1.0, 0.0, 1.0]]]) * math.sqrt(1.5))


def test_debias_takes_the_sampling_error_off_the_mean(make_view):
    # Queries 1 and i: |mean|^2 = 1/2, of which (1 - 1/2) / (2 - 1) = 1/2 is expected from chance alone, so nothing of
    # the direction remains and the modulus is unexplained altogether.
    view = make_view([[1, 0], [0, 2], [-3, 0]], rotary=QUARTER, statistics=one_frequency(2, 1 + 1j, 2.0, 2.0))
    moduli_only = torch.tensor([[[-1.0, 0.0, 1.0]]]) * math.sqrt(1.5)
    torch.testing.assert_close(TriAttention(debias=True).score(view), moduli_only)
    assert (TriAttention(debias=False).score(view) - moduli_only).abs().max() > 0.1


def test_debias_does_not_matter_with_many_queries(make_story):
    view = make_story(lengths=(29,)).view()
    many = replace(
        view.statistics,
        count=view.statistics.count * 1000,
        total=view.statistics.total * 1000,
        modulus=view.statistics.modulus * 1000,
        square=view.statistics.square * 1000,
    )
    view = replace(view, statistics=many)
    torch.testing.assert_close(
        TriAttention(debias=True).score(view), TriAttention(debias=False).score(view), rtol=0, atol=2e-3
    )


def offline(story, num_layers=8):
    """The row's own statistics as if they had been calibrated, for every layer."""
    return TriAttentionStatistics.from_running([story.statistics()] * num_layers, story.rotary, model="tiny")


def test_offline_statistics_replace_the_rows_own(make_story, tmp_path):
    story, other = make_story(lengths=(29,)), make_story(lengths=(25,), seed=7)
    path = tmp_path / "calibration" / "tiny.safetensors"
    offline(other).save(path)
    scorer = TriAttention(statistics=path)
    assert scorer.needs == Needs(statistics=False, rotary=True)
    expected = TriAttention(debias=False).score(replace(story.view(), statistics=other.statistics()))
    torch.testing.assert_close(scorer.score(replace(story.view(), statistics=None)), expected)


def test_dims_that_do_not_turn_count_with_and_without_a_file(make_story):
    story = make_story(lengths=(29,), rotated_dims=4)
    view = story.view()
    own, offline_scorer = TriAttention(debias=False), TriAttention(statistics=offline(story))
    torch.testing.assert_close(offline_scorer.score(view), own.score(view))
    missing = replace(
        offline(story),
        **{name: getattr(offline(story), name)[..., :2] for name in ("mean", "modulus", "inverse_frequencies")},
    )
    with pytest.raises(ValueError, match="hold 2 planes a head, for heads of 4 dims; the model's heads have 8 dims"):
        TriAttention(statistics=missing).score(view)


def test_shrinkage_weighs_by_the_number_of_queries(make_story):
    story, other = make_story(lengths=(29,)), make_story(lengths=(25,), seed=7)
    own, prior, n = story.statistics(), other.statistics(), 25.0
    mixed = QueryStatistics(
        count=torch.tensor([1]),
        total=0.2 * own.total / n + 0.8 * prior.total / 21,
        modulus=0.2 * own.modulus / n + 0.8 * prior.modulus / 21,
        square=own.square,
    )
    scorer = TriAttention(statistics=offline(other), shrinkage_tokens=100.0, debias=False)
    assert scorer.needs.statistics
    expected = TriAttention(debias=False).score(replace(story.view(), statistics=mixed))
    torch.testing.assert_close(scorer.score(story.view()), expected, rtol=1e-4, atol=1e-5)


def test_heads_that_the_file_lacks_use_the_rows_own(make_story):
    story, other = make_story(lengths=(29,)), make_story(lengths=(25,), seed=7)
    full = offline(other)
    count = full.count.clone()
    count[:, 3:] = 0
    scorer = TriAttention(statistics=replace(full, count=count), debias=False)
    assert scorer.needs.statistics
    scores = scorer.score(story.view())
    # Query heads 0 to 2 read kv head 0, 3 to 5 kv head 1.
    torch.testing.assert_close(scores[:, 0], TriAttention(statistics=full).score(story.view())[:, 0])
    torch.testing.assert_close(scores[:, 1], TriAttention(debias=False).score(story.view())[:, 1])


def test_a_row_waits_where_its_own_few_queries_are_all_that_a_head_has(make_story):
    full = offline(make_story(lengths=(25,), seed=7))
    partial = replace(full, count=full.count.index_fill(1, torch.tensor([3]), 0))
    # The first four tokens never count.
    view = make_story(lengths=(20, 19, 3)).view()
    for scorer in (TriAttention(), TriAttention(statistics=partial)):
        assert scorer.waits(view).tolist() == [False, True, True]
    for scorer in (TriAttention(statistics=full), TriAttention(statistics=full, shrinkage_tokens=256.0), TOVA()):
        assert scorer.waits(view) is None


def test_statistics_of_another_model_are_refused_when_scoring(make_story):
    scorer = TriAttention(statistics=offline(make_story(dims=4)))
    with pytest.raises(
        ValueError, match="hold 2 planes a head, for heads of 4 dims; the model's heads have 8 dims, which are 4 planes"
    ):
        scorer.score(make_story().view())


def test_needs_running_statistics_by_default():
    assert TriAttention().needs == Needs(statistics=True, rotary=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"aggregate": "mena"}, "aggregate must be one of 'mean', 'max', got 'mena'; did you mean 'mean'"),
        ({"gqa": "sum"}, "gqa must be one of"),
        ({"offset_max": 0}, "offset_max must be at least 1"),
        ({"shrinkage_tokens": 256.0}, "shrinkage_tokens=256.0 needs statistics to shrink towards"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        TriAttention(**options)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no TriAttention statistics at"):
        TriAttention(statistics=tmp_path / "none.safetensors")
