from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import save_file

from kvstitch.scorers import TriAttentionStatistics
from kvstitch.views import Rotary

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
ROTARY = Rotary(FREQUENCIES, 1.25, True)
HALF = Rotary(FREQUENCIES)


@pytest.fixture
def statistics():
    mean = torch.randn(2, 4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    return TriAttentionStatistics(
        mean=mean,
        modulus=mean.abs() + 0.5,
        count=torch.full((2, 4), 1000),
        inverse_frequencies=FREQUENCIES,
        attention_scaling=1.25,
        interleaved=True,
        model="some/model",
        dtype="bfloat16",
        text_sha256="ab" * 32,
    )


def test_what_is_saved_is_loaded(statistics, tmp_path):
    path = tmp_path / "folder" / "statistics.safetensors"
    statistics.save(path)
    loaded = TriAttentionStatistics.load(path)
    assert (statistics.path, loaded.path) == ("", str(path))
    for field in fields(statistics):
        if field.name == "path":
            continue
        mine, theirs = getattr(statistics, field.name), getattr(loaded, field.name)
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, field.name


def test_check_accepts_the_model_it_was_taken_from(statistics):
    statistics.check(ROTARY, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=6)


@pytest.mark.parametrize(
    "rotary, shape, message",
    [
        (Rotary(FREQUENCIES, 1.25, False), {}, "pair dims as 'interleaved', the model's RoPE as 'half'"),
        (Rotary(FREQUENCIES[:2], 1.25, True), {}, "have 3 of 3 planes that RoPE turns, the model 2 of 3"),
        (Rotary(FREQUENCIES * 1.01, 1.25, True), {}, r"other RoPE frequencies than the model's \(off by 1.0%\)"),
        (Rotary(FREQUENCIES, 1.0, True), {}, "attention scaling 1.25, the model has 1.0"),
        (ROTARY, {"num_layers": 3}, "cover 2 layers of 4 query heads, the model has 3 layers"),
        (ROTARY, {"num_kv_heads": 3}, "and 3 kv heads"),
        (ROTARY, {"num_query_heads": 8}, "of 4 query heads, the model has 2 layers of 8 query heads and 2 kv heads"),
        (
            ROTARY,
            {"head_dim": 8},
            "hold 3 planes a head, for heads of 6 dims; the model's heads have 8 dims, .* 4 planes",
        ),
        (
            ROTARY,
            {"head_dim": 4},
            "hold 3 planes a head, for heads of 6 dims; the model's heads have 4 dims, .* 2 planes",
        ),
    ],
)
def test_check_refuses_another_model_and_names_the_file(statistics, rotary, shape, message, tmp_path):
    shape = {"num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 6} | shape
    with pytest.raises(ValueError, match=f"^statistics of 'some/model' .*{message}.*; calibrate this model with"):
        statistics.check(rotary, **shape)
    statistics.save(tmp_path / "some.safetensors")
    loaded = TriAttentionStatistics.load(tmp_path / "some.safetensors")
    with pytest.raises(ValueError, match=f"^statistics={tmp_path}/some.safetensors of 'some/model' .*{message}"):
        loaded.check(rotary, **shape)


def test_planes_that_rope_leaves_alone_count_for_the_width_and_not_as_turned(statistics):
    """A file of a model that turns 4 of its 6 dims, on that model, on one of 4 dims and on one that turns all 6."""
    partial = replace(statistics, inverse_frequencies=torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64))
    shape = {"num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2}
    live = Rotary(FREQUENCIES[:2], 1.25, True)
    partial.check(live, **shape, head_dim=6)
    # Some models list planes that stand still with frequency 0.
    partial.check(Rotary(partial.inverse_frequencies, 1.25, True), **shape, head_dim=6)
    with pytest.raises(ValueError, match="hold 3 planes a head, for heads of 6 dims; the model's heads have 4 dims"):
        partial.check(live, **shape, head_dim=4)
    with pytest.raises(ValueError, match="have 2 of 3 planes that RoPE turns, the model 3 of 3"):
        partial.check(Rotary(FREQUENCIES, 1.25, True), **shape, head_dim=6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"modulus": torch.ones(2, 3, 3)}, r"modulus must have shape \[2, 4, 3\] to go with mean, got \[2, 3, 3\]"),
        ({"modulus": torch.full((2, 4, 3), float("nan"))}, "not finite"),
        ({"modulus": torch.zeros(2, 4, 3)}, "longer than the mean modulus"),
    ],
)
def test_numbers_that_cannot_be_are_refused(statistics, change, message):
    # With shape annotations checked, the wrong shape is caught one step earlier, as a TypeError.
    with pytest.raises((ValueError, TypeError)) as caught:
        replace(statistics, **change)
    if caught.type is ValueError:
        caught.match(message)


def test_running_sums_become_means_over_rows_and_layers(make_story):
    story = make_story(lengths=(29, 17))
    result = TriAttentionStatistics.from_running([None, story.statistics()], story.rotary, "m", "float32", "t")
    seen = [story.complex(story.queries[b, :, 4:length]) for b, length in enumerate(story.lengths)]
    together = torch.cat(seen, dim=1)
    assert result.count.tolist() == [[0] * 6, [25 + 13] * 6]
    torch.testing.assert_close(result.mean[1], together.mean(dim=1).to(torch.complex64))
    torch.testing.assert_close(result.modulus[1], together.abs().mean(dim=1).float())
    assert not result.complete and (result.model, result.dtype, result.text_sha256) == ("m", "float32", "t")


def test_no_layer_at_all():
    with pytest.raises(ValueError, match="at least one layer"):
        TriAttentionStatistics.from_running([None, None], ROTARY)


def test_a_text_file_is_no_statistics(tmp_path):
    path = tmp_path / "text.safetensors"
    path.write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file .* use TriAttentionStatistics.from_authors_file"):
        TriAttentionStatistics.load(path)


def test_weights_are_no_statistics(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="has format None, expected 'kvstitch.tri_attention.1'"):
        TriAttentionStatistics.load(path)


def test_a_file_with_something_missing(tmp_path):
    path = tmp_path / "part.safetensors"
    save_file({"m_re": torch.ones(1, 1, 3)}, path, {"format": "kvstitch.tri_attention.1", "layout": "half"})
    with pytest.raises(
        ValueError, match="lacks m_im, a, count, inv_freq, attention_scaling, model, dtype, text_sha256"
    ):
        TriAttentionStatistics.load(path)


def authors_file(path, heads=((0, 0), (0, 1), (1, 1)), style="half", frequencies=3):
    """A file with the structure that the authors release."""
    entry = {
        "q_mean_real": torch.tensor([0.3, 0.0, -0.4])[:frequencies],
        "q_mean_imag": torch.tensor([0.4, 0.5, 0.3])[:frequencies],
        "q_abs_mean": torch.tensor([0.6, 0.7, 0.8])[:frequencies],
    }
    content = {
        "metadata": {
            "rope_style": style,
            "head_dim": 6,
            "model_name": "their/model",
            "sampled_heads": [list(h) for h in heads],
        },
        "stats": {f"layer{layer:02d}_head{head:02d}": entry for layer, head in heads},
    }
    torch.save(content, path)
    return path


def test_authors_files_are_read(tmp_path):
    path = authors_file(tmp_path / "stats.pt")
    result = TriAttentionStatistics.from_authors_file(path, HALF, num_layers=2, num_query_heads=2, head_dim=6)
    assert result.count.tolist() == [[-1, -1], [0, -1]]
    torch.testing.assert_close(result.mean[1, 1], torch.tensor([0.3 + 0.4j, 0.5j, -0.4 + 0.3j]))
    torch.testing.assert_close(result.modulus[0, 1], torch.tensor([0.6, 0.7, 0.8]))
    assert result.model == "their/model" and not result.complete
    assert torch.equal(result.inverse_frequencies, FREQUENCIES)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"style": "interleaved"}, "pairs dims as 'interleaved', the model's RoPE as 'half'"),
        (
            {"frequencies": 2},
            "holds 2 frequencies, for a head of 4 dims; the model's heads have 6 dims, .* 3 frequencies",
        ),
        ({"heads": ((0, 0), (5, 0))}, "layer05_head00 does not exist in a model of 2 layers with 2 heads"),
    ],
)
def test_authors_files_of_another_model(tmp_path, options, message):
    path = authors_file(tmp_path / "stats.pt", **options)
    with pytest.raises(ValueError, match=message):
        TriAttentionStatistics.from_authors_file(path, HALF, num_layers=2, num_query_heads=2, head_dim=6)


@pytest.mark.parametrize("frequencies", [3, 2])
def test_authors_files_never_describe_a_partial_rope(tmp_path, frequencies):
    """Neither one of the whole head, whose planes are other pairs of dims, nor one of the turned dims alone."""
    path = authors_file(tmp_path / "stats.pt", frequencies=frequencies)
    with pytest.raises(ValueError, match=r"stats.pt: .* turns 4 of 6 dims; calibrate this model on a text instead"):
        TriAttentionStatistics.from_authors_file(path, Rotary(FREQUENCIES[:2]), 2, 2, head_dim=6)
