"""What `scripts/run.py` does without a word: its budget binds, and every sample sees several compactions."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.evaluation.replay import chunks
from kvstitch.evaluation.streams import Stream

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def defaults():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("run")


@pytest.fixture(scope="module")
def one_layer():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=8192,
        )
    ).eval()  # fmt: skip


def test_a_sample_of_the_default_run_is_compacted_three_times_and_more(defaults, one_layer, random_document):
    task, interval, budget = defaults.task, defaults.interval, defaults.budget
    tokens = random_document(task.length)
    prompt, trace = tokens[: task.prefill_tokens], tokens[task.prefill_tokens :]
    press = instantiate(defaults.press, _convert_="all")
    with press(one_layer) as run:
        stream = Stream(one_layer)
        stream.prefill(prompt)
        run.end_prefill()
        for part in chunks(len(trace), interval):
            stream.feed(trace[part])
        # A question comes next, and with it one more event before the answer.
        in_trace = run.num_events
        stream.feed(random_document(1))
    assert in_trace >= 3 and run.num_events == in_trace + 1
    assert [event.seen_tokens for event in run.events] == list(
        range(task.prefill_tokens + interval, task.length + 1, interval)
    )
    for event in run.events:
        layer = event.layers[0]
        assert layer.slots_before > budget == layer.slots_after
    # Each event throws away what an earlier one had kept: more than once through the same sieve.
    first, last = (set(run.events[at].layers[0].positions.flatten().tolist()) for at in (0, -1))
    assert last - first and first - last


@pytest.fixture
def random_document():
    return lambda length: torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(1)).tolist()
