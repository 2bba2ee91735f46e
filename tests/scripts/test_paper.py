"""What a paper states is shown beside a run and changes nothing of it, from the command line to the report."""

import json
from pathlib import Path

import pytest


def only_folder():
    (folder,) = [path for path in Path("runs").iterdir() if not path.name.startswith(".") and path.name != "report"]
    return folder


@pytest.fixture
def short(tiny_arguments):
    # The paper's lowest budget; the sample of a hundred tokens does not bind it, so that nothing takes long.
    return [text for text in tiny_arguments if not text.startswith("budget=")] + ["task.num_samples=1", "budget=256"]


def test_a_paper_changes_neither_the_folder_nor_what_is_in_it(script, short):
    assert script("run", *short).status == 0
    folder = only_folder()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    dense = {path: path.read_bytes() for path in Path("runs/.dense").rglob("*") if path.is_file()}
    outcome = script("run", *short, "paper=ams_budgets")
    assert outcome.status == 0 and "finished already" in outcome.err and only_folder() == folder
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    (table,) = json.loads(after.pop("paper.json"))["tables"]
    assert after == before and table["rows"]["TOVA"]["figures"] == [29.2, 44.6, 48.8]
    assert {path: path.read_bytes() for path in Path("runs/.dense").rglob("*") if path.is_file()} == dense and dense
    # Whoever asks for none takes none away.
    assert script("run", *short).status == 0 and (folder / "paper.json").exists()


def test_the_report_of_an_experiment_has_the_papers_figures_in_every_output(script, short):
    assert script("run", *short, "paper=ams_budgets").status == 0
    assert "paper:" not in (only_folder() / "config.yaml").read_text()
    shown = script("report", "runs")
    texts = {path.name: path.read_text() for path in Path("runs/report").iterdir()}
    for name, text in {"terminal": shown.out, **texts}.items():
        assert all(words in text for words in ("AMS-TOVA", "36.4", "52.8", "DeepSeek-R1-Distill-Qwen-7B", "pass@1")), (
            name
        )
    without = script("report", "runs", "--no-papers")
    texts = {path.name: path.read_text() for path in Path("runs/report").iterdir()}
    assert len(texts) == 4
    for name, text in {"terminal": without.out, **texts}.items():
        assert "AMS-TOVA" not in text and "pass@1" not in text, name


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["paper=ams_budget"], "there is no paper=ams_budget; choose one of ams_ablation,"),
        (["paper=ams_budget"], "did you mean 'ams_budgets'?"),
        (["+paper.sorce=x"], "there is no option paper.sorce; paper takes source, tables; did you mean 'source'?"),
        (["paper=ams_budgets", "paper.sorce=x"], "there is no option paper.sorce; paper takes source, tables"),
        (["paper=ams_budgets", "paper.source=3"], "paper.source must be text, got 3"),
        (["paper=ams_budgets", "paper.tables=[]"], "paper.tables must be a list that is not empty, got []"),
        (["paper=ams_budgets", "paper.tables.0.dense=true"], "paper.tables[0].dense must hold finite numbers,"),
        (
            ["paper=ams_budgets", "paper.tables.0.budgets=[256]"],
            "figures must be a list of 1, one a budget, got [29.2,",
        ),
    ],
)
def test_a_mistake_in_a_paper_is_one_message_before_anything_is_done(script, short, arguments, message):
    outcome = script("run", *short, *arguments)
    assert outcome.status == 1 and message in outcome.err and "Traceback" not in outcome.err, outcome.err
    assert not Path("runs").exists() or not [path for path in Path("runs").iterdir() if path.name[0] != "."]
