"""kvpress's presses as rows: they keep exactly the budget, and answer as they do in kvpress's own pipeline."""

from importlib.util import find_spec
from io import StringIO

import pytest
import torch
from transformers import DynamicCache

# Installed and not importable is a failure, and no reason to skip.
if find_spec("kvpress") is None:
    pytest.skip("kvpress is not installed", allow_module_level=True)
import kvpress  # noqa: E402

from kvstitch.evaluation.baseline import DenseBaselines  # noqa: E402
from kvstitch.evaluation.kvpress_rows import KVPressBaseline, kvpress_sample  # noqa: E402
from kvstitch.evaluation.progress import Progress  # noqa: E402
from kvstitch.evaluation.records import RunFolder  # noqa: E402
from kvstitch.evaluation.runner import Evaluation, run_evaluation  # noqa: E402


@pytest.mark.parametrize("budget, kept", [(1, 1), (37, 37), (0.25, 25), (100, 100), (500, 100)])
def test_the_budget_is_kept_to_the_slot(tiny, make_sample, make_task, budget, kept):
    sample = make_sample("a", questions=2)
    record = kvpress_sample(tiny, KVPressBaseline("KnormPress", budget), make_task([sample]), sample).record
    metrics = record["metrics"]
    # While it is read, each layer holds the whole context; two questions of a cue and an answer come after it.
    assert metrics["mean_slots"] == kept and metrics["peak_slots"] == 100 < metrics["dense_peak_slots"]
    heads = tiny.model.config.num_key_value_heads
    per_layer = 2 * heads * 16 * 4
    layers = tiny.model.config.num_hidden_layers
    assert metrics["mean_kv_bytes"] == layers * kept * per_layer
    # The last layer is whole when all before it are compressed.
    assert metrics["kv_bytes"] == max((layers - 1) * kept + 100, 100) * per_layer
    assert metrics["events"] == (kept < 100)
    if kept == 100:
        assert all(answer["pressed"] == answer["dense"] for answer in record["answers"])


def test_answers_are_those_of_kvpress_s_pipeline(tiny, make_sample, make_task):
    sample = make_sample("a", questions=3, max_new_tokens=6)
    record = kvpress_sample(tiny, KVPressBaseline("KnormPress", 20), make_task([sample]), sample).record
    pipe = kvpress.KVPressTextGenerationPipeline(model=tiny.model, tokenizer=tiny.tokenizer)
    inputs = {
        "context_ids": torch.tensor([[*sample.prompt_ids, *sample.trace_ids]]),
        "questions_ids": [torch.tensor([list(question.cue_ids)]) for question in sample.questions],
    }
    press = kvpress.KnormPress(compression_ratio=0.795)
    with torch.no_grad():
        theirs = pipe._forward(inputs, max_new_tokens=6, press=press, cache=DynamicCache())
    assert [answer["pressed"]["text"] for answer in record["answers"]] == theirs


def test_a_dense_record_serves_every_press(tiny, make_sample, make_task, tmp_path):
    sample = make_sample("a", questions=2)
    baselines = DenseBaselines(tmp_path, tiny.model, {"mode": "context"})
    results = [
        kvpress_sample(tiny, KVPressBaseline("KnormPress", budget), make_task([sample]), sample, baselines=kept).record
        for budget, kept in ((20, None), (20, baselines), (20, baselines), (40, baselines))
    ]
    assert [result["metrics"]["dense_reused"] for result in results] == [0, 0, 1, 1]
    assert results[0]["answers"] == results[1]["answers"] == results[2]["answers"]
    same = ("dense_accuracy", "dense_kv_bytes", "dense_mean_kv_bytes", "dense_peak_slots")
    assert len({tuple(result["metrics"][name] for name in same) for result in results}) == 1


def test_a_row_beside_ours(tiny, make_sample, make_task, tmp_path):
    evaluation = Evaluation(KVPressBaseline("KnormPress", 20), make_task([make_sample("a"), make_sample("b")]))
    with RunFolder(tmp_path / "run").opened("") as folder:
        labels = {"press": "kvpress", "mode": "replay"}
        metrics = run_evaluation(evaluation, lambda: tiny, folder, labels, Progress(StringIO()))
    assert metrics["budget_bound"] is True and metrics["metrics"]["accuracy"]["n"] == 2
    assert metrics["metrics"]["dense_accuracy"]["n"] == 2


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        (
            ("SnapKvPress", 20),
            ValueError,
            "is no press of kvpress .*; choose one of AdaKVPress, .*; did you mean 'SnapKVPress'?",
        ),
        (("KnormPress", "64MiB"), ValueError, "must be tokens or a kept fraction, got bytes"),
        (("KnormPress", 2.5), ValueError, "kept fraction"),
        (("knorm", 20), ValueError, "did you mean 'KnormPress'?"),
        (("KnormPress", 20, "wide"), TypeError, "press.options must map arguments of the press to values, got 'wide'"),
        (("KnormPress", 20, {"widht": 3}), ValueError, "press.options={'widht': 3}: .*'widht'"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        KVPressBaseline(*arguments)
