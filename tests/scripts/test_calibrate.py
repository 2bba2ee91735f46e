"""Statistics taken by the command are those of the text, and a run scores with them."""

import re

import pytest
import torch

from kvstitch.scorers import TriAttentionStatistics


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{3 + (7 * i * i + i) % 94}" for i in range(400)))
    return path


@pytest.fixture
def arguments(tiny_folder, text):
    return "model=hub", f"model.name={tiny_folder}", "model.device=cpu", f"text={text}", "tokens=300"


def test_calibrate_then_run(script, arguments, tiny_arguments, tmp_path):
    output = tmp_path / "statistics.safetensors"
    outcome = script("calibrate", *arguments, f"output={output}", "chunk_tokens=64")
    assert outcome.status == 0, outcome.err
    assert "3 layers, 300 tokens" in outcome.out
    chunked = TriAttentionStatistics.load(output)
    assert chunked.complete and int(chunked.count.min()) == 296
    again = tmp_path / "again.safetensors"
    assert script("calibrate", *arguments, f"output={again}", "chunk_tokens=300").status == 0
    whole = TriAttentionStatistics.load(again)
    assert torch.allclose(chunked.mean, whole.mean, atol=1e-5) and torch.allclose(
        chunked.modulus, whole.modulus, atol=1e-5
    )
    outcome = script("run", *tiny_arguments, "scorer=triattention", f"scorer.statistics={output}")
    assert outcome.status == 0, outcome.err


def authors_file(path, layers=3, frequencies=8):
    """As the authors release them, for the tiny model of four query heads."""
    entry = {"q_mean_real": torch.full((frequencies,), 0.3), "q_mean_imag": torch.zeros(frequencies)}
    entry["q_abs_mean"] = torch.full((frequencies,), 0.5)
    stats = {f"layer{layer:02d}_head{head:02d}": entry for layer in range(layers) for head in range(4)}
    torch.save({"metadata": {"rope_style": "half", "model_name": "their/model"}, "stats": stats}, path)
    return path


def test_a_file_of_the_authors_is_brought_into_our_form(script, arguments, tiny_arguments, tmp_path):
    given, output = authors_file(tmp_path / "theirs.pt"), tmp_path / "ours.safetensors"
    outcome = script("calibrate", *arguments[:3], f"authors_file={given}", f"output={output}")
    assert outcome.status == 0, outcome.err
    assert "3 layers, 12 of 12 heads" in outcome.out
    statistics = TriAttentionStatistics.load(output)
    assert statistics.complete and statistics.model == "their/model" and (statistics.modulus == 0.5).all()
    outcome = script("run", *tiny_arguments, "scorer=triattention", f"scorer.statistics={output}")
    assert outcome.status == 0, outcome.err


def test_files_of_the_authors_that_cannot_be(script, arguments, tmp_path):
    output = tmp_path / "ours.safetensors"
    for given, message in (
        (authors_file(tmp_path / "deep.pt", layers=4), "layer03_head00 does not exist in a model of 3 layers"),
        (
            authors_file(tmp_path / "wide.pt", frequencies=9),
            "holds 9 frequencies, for a head of 18 dims; the model's heads have 16 dims",
        ),
        (tmp_path / "absent.pt", "absent.pt: no such file"),
    ):
        outcome = script("calibrate", *arguments[:3], f"authors_file={given}", f"output={output}")
        assert outcome.status == 1 and re.search(message, outcome.err), outcome.err
        assert "Traceback" not in outcome.err and not output.exists()
    for sources in ([], [arguments[3], f"authors_file={given}"]):
        outcome = script("calibrate", *arguments[:3], *sources, f"output={output}")
        assert outcome.status == 1 and "give one of the two" in outcome.err


def test_nothing_is_overwritten(script, arguments, tmp_path):
    output = tmp_path / "statistics.safetensors"
    output.write_bytes(b"mine")
    outcome = script("calibrate", *arguments, f"output={output}")
    assert outcome.status == 1 and "exists already" in outcome.err and output.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "change, message",
    [
        (["output=x.pt"], "must end in .safetensors"),
        (["output=x.safetensors", "text=absent.txt"], "text=absent.txt: no such file"),
        (["output=x.safetensors", "tokens=7"], "at least 16, got 7"),
        (["output=x.safetensors", "tokens=2000"], "at most 1024"),
        (["output=x.safetensors", "token=300"], "there is no option token; valid keys are.*did you mean 'tokens'"),
        (["output=x.safetensors", "+tokns=300"], "there is no option tokns; valid keys are.*did you mean 'tokens'"),
        (["output=5"], "output must be the name of a file, got 5"),
        (["output=null"], "output must be the name of a file, got None"),
        (["output=x.safetensors", "text=[a]"], r"text must be the name of a file, got \['a'\]"),
        (["output=x.safetensors", "~text"], "text was taken away, but it is needed"),
        ([], "output must be given"),
    ],
)
def test_bad_input_is_one_message(script, arguments, change, message):
    outcome = script("calibrate", *arguments, *change)
    assert outcome.status == 1
    assert re.search(message, outcome.err.strip().splitlines()[-1]), outcome.err
    assert "Traceback" not in outcome.err


def test_a_run_with_the_file_of_another_model_is_one_message(script, tiny_arguments, tmp_path):
    """Twice as many planes, the second half of which stands still: only the width of a head tells."""
    path = tmp_path / "wide.safetensors"
    frequencies = torch.zeros(16, dtype=torch.float64)
    frequencies[:8] = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    mean = torch.full((3, 4, 16), 0.3, dtype=torch.complex64)
    count = torch.full((3, 4), 1000)
    TriAttentionStatistics(mean, mean.abs() * 2, count, frequencies, 1.0, False, model="wide/model").save(path)
    outcome = script("run", *tiny_arguments, "scorer=triattention", f"scorer.statistics={path}")
    assert outcome.status == 1 and "Traceback" not in outcome.err
    assert re.search(
        f"error: scorer.statistics={path} of 'wide/model' hold 16 planes a head, for heads of 32 dims; the model's heads have 16",
        outcome.err,
    ), outcome.err
