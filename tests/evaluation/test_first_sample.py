"""What the model reads can be read."""

from io import StringIO

from kvstitch.evaluation.first_sample import FIRST_SAMPLE, sample_text
from kvstitch.evaluation.progress import Progress
from kvstitch.evaluation.records import RunFolder
from kvstitch.evaluation.runner import Evaluation, run_evaluation


def test_all_that_is_fed_is_told(tiny, make_sample):
    sample = make_sample("a", questions=2)
    text = sample_text(sample, tiny.tokenizer)
    assert text.startswith("===== sample a")
    for title, ids in (("prompt", sample.prompt_ids), ("trace (replay feeds it through the press)", sample.trace_ids)):
        assert f"===== {title}, {len(ids)} tokens =====\n{tiny.tokenizer.decode(list(ids))}\n" in text
    for question in sample.questions:
        assert f"{tiny.tokenizer.decode(list(question.cue_ids))}\n===== its answer: {question.gold[0]} " in text


def test_a_run_keeps_its_first_sample_and_never_overwrites_it(tiny, make_sample, make_task, make_press, tmp_path):
    samples = [make_sample("a", questions=1), make_sample("b", questions=1)]
    evaluation = Evaluation(make_press(), make_task(samples), interval=16, speed_tokens=0)
    with RunFolder(tmp_path / "run").opened("") as folder:
        run_evaluation(evaluation, lambda: tiny, folder, {"press": "topk", "mode": "replay"}, Progress(StringIO()))
    assert (tmp_path / "run" / FIRST_SAMPLE).read_text(encoding="utf-8") == sample_text(samples[0], tiny.tokenizer)
