"""A first look presses even what is short, and a template is worded on the command line."""

import json
import random
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def only_run(directory="runs"):
    (folder,) = [path for path in Path(directory).iterdir() if not path.name.startswith(".")]
    return folder


@pytest.mark.parametrize("press", ["ams", "topk"])
def test_the_smoke_run_presses_a_prompt_of_a_hundred_words(script, tiny_folder, tmp_path, press):
    """As it is with the problems of GSM8K, the searches of dfs and the shortest of the generated tasks: no trace."""
    rng, path = random.Random(2), tmp_path / "short.jsonl"
    prompt = " ".join(f"w{rng.randrange(3, 97)}" for _ in range(100))
    path.write_text(json.dumps({"prompt": prompt, "answer": "w5"}) + "\n")
    model = ["model=hub", f"model.name={tiny_folder}", "model.device=cpu"]
    outcome = script(
        "run", "debug=smoke", f"press={press}", *model, "task=jsonl", f"task.path={path}", "task.cue=' w7 w8'"
    )
    assert outcome.status == 0, outcome.err
    assert json.loads((only_run() / "metrics.json").read_text())["budget_bound"], outcome.out


def test_a_template_in_quotes_of_its_own_keeps_its_new_line():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("run", overrides=["task=gsm8k", 'task.template="Question: {question}\nAnswer:"'])
    assert config.task.template == "Question: {question}\nAnswer:"
