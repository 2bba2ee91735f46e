"""TriAttention's files of another model are refused when a press enters, before anything runs; a model's own go in."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from kvstitch.presses import EvictionPress
from kvstitch.presses.calibration import collect_query_statistics
from kvstitch.scorers import TriAttention, TriAttentionStatistics


def llama_with(shape, **changes):
    return LlamaForCausalLM(LlamaConfig(**(shape | {"head_dim": 16} | changes))).eval()


def half_turned(shape, head_dim):
    """A model whose RoPE turns half of each head, at the frequencies of a whole head of half the size."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Phi3ForCausalLM(Phi3Config(**shape | {"hidden_size": 4 * head_dim}, rope_parameters=rope)).eval()


@pytest.fixture
def calibrated(random_tokens, tmp_path):
    """`calibrated(model)` -> path of the model's own statistics, as scripts/calibrate.py writes them."""

    def make(model):
        layers, rotary = collect_query_statistics(model, random_tokens(1, 40), chunk_tokens=20)
        path = tmp_path / "own.safetensors"
        TriAttentionStatistics.from_running(layers, rotary, model="some/model").save(path)
        return path

    return make


@pytest.fixture
def press_with(shaped_topk):
    return lambda path: EvictionPress(TriAttention(statistics=path), shaped_topk(), budget=12, interval=6)


OTHERS = {
    # The first eight frequencies are the model's, and the other planes stand still: the width alone tells them apart.
    "wider": (
        lambda shape: half_turned(shape, 32),
        "hold 16 planes a head, for heads of 32 dims; the model's heads have 16 dims",
    ),
    "narrower": (
        lambda shape: llama_with(shape, head_dim=8),
        "hold 4 planes a head, for heads of 8 dims; the model's heads have 16",
    ),
    "fewer_turned": (lambda shape: half_turned(shape, 16), "have 4 of 8 planes that RoPE turns, the model 8 of 8"),
    "layers": (
        lambda shape: llama_with(shape, num_hidden_layers=3),
        "cover 3 layers of 4 query heads, the model has 4 layers",
    ),
    "query_heads": (
        lambda shape: llama_with(shape, num_attention_heads=8),
        "of 8 query heads, the model has 4 layers of 4 query",
    ),
    "frequencies": (
        lambda shape: llama_with(shape, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        "were taken at other RoPE frequencies than the model's",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_another_model(llama, calibrated, press_with, name, model_shape):
    build, message = OTHERS[name]
    path = calibrated(build(model_shape))
    forwards = []
    llama.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=f"statistics={path} of 'some/model' .*{message}.*; calibrate this model with"):
        with press_with(path)(llama):
            pytest.fail("the press entered")
    assert not forwards


def test_a_whole_head_is_no_part_of_a_larger_one(calibrated, press_with, model_shape):
    """The other way round: the file knows the planes that turn, and nothing of the others."""
    path = calibrated(llama_with(model_shape))
    with pytest.raises(ValueError, match="hold 8 planes a head, for heads of 16 dims; the model's heads have 32 dims"):
        press_with(path)(half_turned(model_shape, 32))


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_its_own_file_serves_a_model(make_model, random_tokens, calibrated, press_with, name):
    model = make_model(name)
    ids = random_tokens(1, 40)
    with press_with(calibrated(model))(model) as run:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert run.num_events >= 2
