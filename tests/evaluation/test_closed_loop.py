"""Token by token through the press and densely, from one prompt."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstitch.allocators.retrieval import CommunityRetrieval, OracleRetrieval
from kvstitch.evaluation import closed_loop
from kvstitch.evaluation.baseline import DenseBaselines
from kvstitch.evaluation.closed_loop import closed_loop_sample
from kvstitch.evaluation.metrics import NonFiniteLogits
from kvstitch.evaluation.models import LoadedModel
from kvstitch.evaluation.streams import Stream
from kvstitch.evaluation.tasks.base import Question, Sample
from kvstitch.presses.retrieval import RetrievalPress

TOKENS = torch.randint(3, 90, (120,), generator=torch.Generator().manual_seed(0)).tolist()
SAMPLE = Sample("a", tuple(TOKENS[:80]), tuple(TOKENS[80:]), (Question("", (5, 6), ("x",), 3),))
COMMUNITY = CommunityRetrieval(top_k=3, refine_steps=2, replacement=2)
ORACLE = OracleRetrieval()


class Tokenizer:
    eos_token_id = pad_token_id = 0

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


class Grader:
    def grade(self, question, prediction):
        return float(len(prediction.split()) == question.max_new_tokens)


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    model.generation_config.eos_token_id = None
    return LoadedModel(model, Tokenizer())


def metrics_of(loaded, allocator, budget=24, speed_tokens=2, baselines=None, **options):
    press = RetrievalPress(allocator, budget, num_sinks=2, num_recent=4, **options)
    result = closed_loop_sample(loaded, press, Grader(), SAMPLE, speed_tokens=speed_tokens, baselines=baselines)
    return result.record["metrics"]


def test_metrics_are_those_of_the_two_models(loaded):
    """KL, agreement and NLL from logits that are computed here, step by step and in one dense forward."""
    metrics = metrics_of(loaded, COMMUNITY)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        dense = loaded.model(ids).logits[0, 80:-1].log_softmax(-1)
        with RetrievalPress(COMMUNITY, 24, num_sinks=2, num_recent=4)(loaded.model):
            out = loaded.model(ids[:, :80], use_cache=True)
            logits = []
            for at in range(80, 119):
                out = loaded.model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
                logits.append(out.logits[0])
    pressed = torch.cat(logits).log_softmax(-1)
    targets = ids[0, 81:, None]
    assert metrics["compared_tokens"] == 39
    assert metrics["kl"] == pytest.approx((dense.exp() * (dense - pressed)).sum(-1).mean().item(), rel=1e-3)
    assert metrics["nll"] == pytest.approx(-pressed.gather(1, targets).mean().item(), rel=1e-4)
    assert metrics["dense_nll"] == pytest.approx(-dense.gather(1, targets).mean().item(), rel=1e-4)
    assert metrics["top1_agreement"] == pytest.approx((dense.argmax(-1) == pressed.argmax(-1)).float().mean().item())
    assert metrics["kl"] > 1e-4, "the press does something"


def test_reads_and_recall(loaded):
    metrics = metrics_of(loaded, COMMUNITY)
    assert metrics["read_slots"] == 24 and metrics["read_index_rows"] > 0
    assert 0 < metrics["mass_recall_worst"] <= metrics["mass_recall"] < 1
    assert metrics["read_bytes"] < metrics["dense_read_bytes"] * 2
    assert metrics["events"] == 1 and metrics["index_share"] > 0 and metrics["modularity"] is not None
    assert metrics["graph_tokens"] == 80
    # 80 tokens of the prompt, the 40 that follow, and 4 that are fed to answer a question; nothing is evicted.
    for side in ("", "dense_"):
        assert metrics[side + "mean_slots"] == (sum(range(81, 121)) + sum(range(121, 125))) / 44
        assert metrics[side + "peak_slots"] == 124
    assert metrics["dense_kv_bytes"] == 2 * 3 * 2 * 16 * 4 * 124 and metrics["dense_prefill_seconds"] > 0
    assert metrics["kv_bytes"] >= metrics["mean_kv_bytes"] >= 2 * 3 * 2 * 16 * 4 * 100
    assert metrics["auxiliary_bytes"] > 0
    oracle = metrics_of(loaded, OracleRetrieval())
    assert oracle["mass_recall"] > metrics["mass_recall"]
    assert oracle["modularity"] is None


def test_questions_and_speed(loaded):
    metrics = metrics_of(loaded, COMMUNITY)
    assert metrics["accuracy"] == metrics["dense_accuracy"] == 1 and metrics["answer_tokens"] == 3
    assert metrics["decode_tokens_per_second"] > 0 and metrics["dense_decode_tokens_per_second"] > 0


@pytest.mark.parametrize("refresh", [None, 8])
def test_the_share_of_indices_is_that_of_the_run_that_was_measured(loaded, monkeypatch, refresh):
    """Numerator and denominator, prompt, trace and questions included, next to what events and streams say themselves."""
    streams, events = [], []

    class Noted(Stream):
        def __post_init__(self):
            super().__post_init__()
            streams.append(self)

    monkeypatch.setattr(closed_loop, "Stream", Noted)
    allocator = dataclasses.replace(COMMUNITY, refresh=refresh)
    # Without timed steps: indices that they renew are no part of the measured run.
    metrics = metrics_of(loaded, allocator, speed_tokens=0, on_event=events.append)
    assert (len(events) > 1) == (refresh is not None)
    expected = sum(event.observe_seconds + event.seconds for event in events) / streams[0].seconds
    assert metrics["event_time_share"] == pytest.approx(expected, rel=1e-9) and 0 < expected < 1


def test_a_dense_record_serves_every_press(loaded, tmp_path):
    baselines = DenseBaselines(tmp_path, loaded.model, {"mode": "closed_loop"})
    runs = [
        metrics_of(loaded, allocator, baselines=kept)
        for allocator, kept in ((COMMUNITY, None), (COMMUNITY, baselines), (COMMUNITY, baselines), (ORACLE, baselines))
    ]
    assert [run.pop("dense_reused") for run in runs] == [0, 0, 1, 1]
    timed = {name for name in runs[0] if "second" in name or name == "event_time_share"}
    alone, made, read, other = ({key: run[key] for key in run.keys() - timed} for run in runs)
    assert alone == made == read
    assert {key: value for key, value in other.items() if key.startswith("dense_") and key != "dense_read_bytes"} == {
        key: value for key, value in read.items() if key.startswith("dense_") and key != "dense_read_bytes"
    }


def test_nan_stops_the_sample_before_an_index_is_made_of_it(loaded):
    """The queries of the prompt hold NaN, of which no distance between keys can be told."""
    loaded.model.get_input_embeddings().weight.data[TOKENS[70]] = torch.nan
    with pytest.raises(NonFiniteLogits, match="end of the prompt"):
        metrics_of(loaded, CommunityRetrieval(top_k=3))


def test_a_watcher_is_told_and_changes_nothing(loaded):
    seen = []
    watched = metrics_of(loaded, COMMUNITY, on_read=seen.append)
    alone = metrics_of(loaded, COMMUNITY)
    assert seen and watched["kl"] == alone["kl"]


def test_a_sample_without_a_trace(loaded):
    press = RetrievalPress(COMMUNITY, 24, num_sinks=2, num_recent=4)
    sample = dataclasses.replace(SAMPLE, trace_ids=())
    metrics = closed_loop_sample(loaded, press, Grader(), sample, speed_tokens=0).record["metrics"]
    assert metrics["compared_tokens"] == 0 and metrics["kl"] is None and metrics["accuracy"] == 1
    assert metrics["decode_tokens_per_second"] is None
