"""Laws that hold for any scorer with any evicting allocator, read from `configs/`."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.allocators import EvictingAllocator
from kvstitch.presses import EvictionPress

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BUDGET, INTERVAL, STEPS = 48, 8, 30


def parts(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def build(group: str, name: str):
    config = OmegaConf.load(CONFIGS / group / f"{name}.yaml")
    config.pop("defaults", None)
    if name == "kvpress" and find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")
    return instantiate(config, _convert_="all")


ALLOCATORS = [name for name in parts("allocator") if isinstance(build("allocator", name), EvictingAllocator)]
# Quotas of the public code depend on the other rows of a batch; that is one of the things it replays.
BATCH_COUPLED = {"segment_quota_reference"}
UNEQUAL = {"head_adaptive", "head_adaptive_mask", "pyramid"}


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        )
    ).eval()  # fmt: skip
    model.generation_config.eos_token_id = None
    return model


def generate(model, press, ids, mask):
    with press(model) as run:
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    return run, out[:, ids.shape[1] :]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scorer", parts("scorer"))
def test_any_scorer_with_any_allocator(tiny, left_padded, scorer, allocator):
    ids, mask, rows = left_padded([61, 50])
    press = EvictionPress(
        build("scorer", scorer), build("allocator", allocator), BUDGET, interval=INTERVAL, compress_prompt=True
    )
    run, tokens = generate(tiny, press, ids, mask)
    assert run.num_events >= 3
    seen = torch.tensor([61, 50])
    for event in run.events:
        lengths = seen + event.seen_tokens - 61
        kept_in_all = 0
        for layer in event.layers:
            positions = layer.positions
            filled = positions >= 0
            kept_in_all += int(filled.sum())
            for row in range(2):
                for head in range(2):
                    kept = positions[row, head][filled[row, head]]
                    assert (kept.diff() > 0).all(), "positions ascend and none stands twice"
                    assert set(range(4)) <= set(kept.tolist()), "sinks are kept"
                    newest = int(lengths[row])
                    recent = press.allocator.num_recent
                    assert set(range(newest - recent, newest)) <= set(kept.tolist()), "the recent window is kept"
                    assert int(kept.max()) < newest
                    if allocator not in UNEQUAL:
                        assert len(kept) == min(BUDGET, newest), "the budget is met exactly"
        if len(event.layers) == 2:
            assert kept_in_all == 2 * 2 * int(lengths.clamp(max=BUDGET).sum()), "the total is exact"
    for row, single in enumerate([] if allocator in BATCH_COUPLED else rows):
        _, alone = generate(tiny, press, single, torch.ones_like(single))
        assert torch.equal(tokens[row], alone[0]), f"row {row} is its own single run"


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_budget_above_the_length_changes_nothing(tiny, left_padded, allocator):
    ids, mask, _ = left_padded([30, 21])
    dense = tiny.generate(input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    press = EvictionPress(build("scorer", "tova"), build("allocator", allocator), 200, interval=5, compress_prompt=True)
    run, tokens = generate(tiny, press, ids, mask)
    assert torch.equal(tokens, dense[:, 30:])
    assert run.num_events == 0 and not run.bound
