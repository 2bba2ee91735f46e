"""Mass recall against plain loops: the function by itself, and what replay makes of it for a run fed one token at a time."""

import math

import pytest
import torch
from transformers import DynamicCache

from kvstitch.evaluation.recall import RecallRun, held_positions, mass_recall
from kvstitch.evaluation.replay import chunks, replay_sample

PROMPT, TRACE, INTERVAL = 10, 90, 16


def test_shares_are_what_loops_give():
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(4, 3, 8, generator=generator), torch.randn(2, 11, 8, generator=generator)
    held = torch.rand(2, 11, generator=generator) < 0.5
    places, scaling = torch.tensor([4, 7, 10]), 0.4
    for softcap in (None, 1.5):
        got = mass_recall(query, keys, held, places, scaling, softcap)
        for head in range(4):
            for row, place in enumerate(places.tolist()):
                logits = [
                    scaling * float(query[head, row].double() @ keys[head // 2, s].double()) for s in range(place + 1)
                ]
                logits = [softcap * math.tanh(x / softcap) if softcap else x for x in logits]
                weights = [math.exp(x) for x in logits]
                wanted = sum(w for s, w in enumerate(weights) if held[head // 2, s]) / sum(weights)
                assert float(got[head, row]) == pytest.approx(wanted, abs=1e-6)


def test_blocks_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    query, keys = torch.randn(4, 9, 8, generator=generator), torch.randn(2, 20, 8, generator=generator)
    held, places = torch.rand(2, 20, generator=generator) < 0.5, torch.arange(11, 20)
    whole = mass_recall(query, keys, held, places, 0.3)
    monkeypatch.setattr("kvstitch.evaluation.recall._BLOCK_WEIGHTS", 4 * 20 * 2)
    torch.testing.assert_close(mass_recall(query, keys, held, places, 0.3), whole)


def test_held_positions():
    held = held_positions(torch.tensor([[0, 3, -1], [1, 2, 4]]), 5)
    assert held.tolist() == [[True, False, False, True, False], [False, True, True, False, True]]


def by_hand(model, press, sample, asked):
    """Recall of the queries at some positions: every forward is one token, all queries and keys are caught at the attention."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    facts = {}

    def catch(module, args, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        shape = (1, hidden.shape[1], -1, module.head_dim)
        query = module.q_proj(hidden).view(shape).transpose(1, 2)
        key = module.k_proj(hidden).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        facts.setdefault(module.layer_idx, []).append((query[0, :, -1].double(), key[0].double()))

    handles = [layer.self_attn.register_forward_pre_hook(catch, with_kwargs=True) for layer in model.model.layers]
    cache, shares = DynamicCache(config=model.config), []
    tokens = (*sample.prompt_ids, *sample.trace_ids)
    with press(model) as run, torch.no_grad():
        model(input_ids=torch.tensor([tokens[:PROMPT]]), past_key_values=cache)
        for place in range(PROMPT, len(tokens)):
            model(input_ids=torch.tensor([tokens[place : place + 1]]), past_key_values=cache)
            if place not in asked:
                continue
            for layer, caught in facts.items():
                keys = torch.cat([key for _, key in caught], dim=1)
                for head in range(4):
                    weights = (caught[-1][0][head] @ keys[head // 2].T * 16**-0.5).softmax(-1)
                    kept = run.positions(layer)[0, head // 2]
                    shares.append((layer, head, float(weights[kept[kept >= 0]].sum())))
    for handle in handles:
        handle.remove()
    return shares


@pytest.mark.parametrize("compress_prompt", [False, True])
def test_replay_measures_what_decoding_token_by_token_gives(tiny, make_press, make_sample, make_task, compress_prompt):
    press = make_press(budget=8 if compress_prompt else 24, interval=INTERVAL, compress_prompt=compress_prompt)
    sample = make_sample("a", PROMPT, TRACE, questions=1)
    result = replay_sample(tiny, press, make_task([sample]), sample, interval=INTERVAL, speed_tokens=2)
    metrics = result.record["metrics"]
    # A chunk has 16 tokens, so every query from the second interval on is asked.
    first = PROMPT if compress_prompt else PROMPT + INTERVAL
    shares = by_hand(tiny.model, press, sample, set(range(first, PROMPT + TRACE)))
    wanted = sum(share for *_, share in shares) / len(shares)
    assert metrics["mass_recall"] == pytest.approx(wanted, abs=1e-5) and 0.05 < wanted < 0.95
    heads = {}
    for layer, head, share in shares:
        heads.setdefault((layer, head), []).append(share)
    least = min(sum(each) / len(each) for each in heads.values())
    # A tenth of 12 heads is one.
    assert metrics["mass_recall_worst"] == pytest.approx(least, abs=1e-5)


def test_few_queries_are_spaced_evenly_and_nothing_else_changes(tiny, make_press, make_sample, make_task):
    press, sample = make_press(budget=24, interval=INTERVAL), make_sample("a", PROMPT, TRACE)
    asked = set()
    for chunk in chunks(TRACE, INTERVAL):
        if chunk.start >= INTERVAL:
            places = torch.linspace(0, chunk.stop - chunk.start - 1, 3).round().long() + chunk.start + PROMPT
            asked |= set(places.tolist())
    task, unsteady = make_task([sample]), ("second", "time")
    few, none = (
        replay_sample(tiny, press, task, sample, interval=INTERVAL, speed_tokens=0, mass_queries=queries).record[
            "metrics"
        ]
        for queries in (3, 0)
    )
    shares = [share for *_, share in by_hand(tiny.model, press, sample, asked)]
    assert few["mass_recall"] == pytest.approx(sum(shares) / len(shares), abs=1e-5)
    assert none["mass_recall"] is None and none["mass_recall_worst"] is None
    for name, value in none.items():
        if not name.startswith("mass_recall") and not any(word in name for word in unsteady):
            assert few[name] == value, name


def test_what_never_evicts_recalls_everything(tiny, make_press, make_sample, make_task):
    sample = make_sample("a", PROMPT, TRACE)
    result = replay_sample(tiny, make_press(budget=500), make_task([sample]), sample, interval=INTERVAL, speed_tokens=0)
    assert result.record["metrics"]["mass_recall"] == pytest.approx(1)


def test_measuring_takes_time_of_its_own(tiny, make_press):
    press = make_press(budget=24, interval=INTERVAL)
    with RecallRun(press, tiny.model, queries=4, first=0) as run, torch.no_grad():
        cache = DynamicCache(config=tiny.model.config)
        tiny.model(input_ids=torch.arange(3, 30)[None], past_key_values=cache)
        taken = run.measuring_seconds
        assert taken > 0 and run.recall()["mass_recall"] == pytest.approx(1)
        run.measuring = False
        tiny.model(input_ids=torch.arange(3, 30)[None], past_key_values=cache)
        assert run.measuring_seconds == taken
