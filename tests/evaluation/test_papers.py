"""What papers state is data that holds together; a mistake in it is named, and a run's folder keeps it."""

import copy
import json
import math
from pathlib import Path

import pytest
import yaml

import kvstitch.configs
from kvstitch.evaluation.paper_reading import paper_tables, read_tables
from kvstitch.evaluation.paper_records import record_tables, recorded_tables
from kvstitch.evaluation.paper_tables import written
from kvstitch.evaluation.records import RunError, RunFolder

CONFIGS = Path(kvstitch.configs.__file__).parent
FILES = sorted(path.stem for path in (CONFIGS / "paper").glob("*.yaml"))
PAPER = {
    "source": "Somebody (arXiv 0000.00000)",
    "tables": [
        {
            "table": "table 1",
            "model": "a model of 7B",
            "task": "Math500",
            "metric": "pass@1",
            "unit": "%",
            "our_metrics": ["accuracy", "kl"],
            "budgets": [256, 512],
            "dense": 52.8,
            "rows": {
                "TOVA": {"match": {"press": "topk", "scorer": "tova"}, "figures": [29.2, None]},
                "AMS": {"match": {"press": "ams", "allocator": ["a", "b"]}, "figures": [36.4, "above 40"]},
            },
        },
        {
            "table": "table 2",
            "model": ["4B", "8B"],
            "task": "LongBench v2",
            "metric": "answers right",
            "our_metrics": ["accuracy"],
            "dense": [27.4, 31.4],
            "rows": {"full": {"match": {"press": "community"}, "figures": [25.4, 28.5]}},
        },
    ],
}


def changed(path, value):
    """`PAPER` with another value at a path such as `tables.0.model`."""
    paper = copy.deepcopy(PAPER)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = paper
    for key in parents:
        place = place[key]
    place[last] = value
    return paper


def test_a_table_gives_the_figure_of_a_row_at_a_budget():
    first, second = read_tables(PAPER)
    tova, ams = first.rows
    assert [first.figure(tova, tokens) for tokens in (256, 512, 128, None)] == [29.2, None, None, None]
    assert first.figure(ams, 512) == "above 40" and first.figure(ams, 256.0) == 36.4
    # A table without budgets holds at any.
    assert second.figure(second.rows[0], None) == (25.4, 28.5) == second.figure(second.rows[0], 77)
    assert (first.measured, second.measured) == ("pass@1, %", "answers right")
    assert (written(second.model), written(second.dense), written(first.dense)) == ("4B / 8B", "27.4 / 31.4", "52.8")
    assert first.name == "Somebody (arXiv 0000.00000), table 1"


def test_a_row_fits_what_has_all_that_it_wants():
    tova, ams = read_tables(PAPER)[0].rows
    assert tova.fits({"press": "topk", "scorer": "tova", "allocator": "any"})
    assert not tova.fits({"press": "topk", "scorer": "snapkv"}) and not tova.fits({"press": "topk"})
    assert ams.fits({"press": "ams", "allocator": "b"}) and not ams.fits({"press": "ams", "allocator": "c"})


def test_no_paper_is_no_table():
    assert read_tables(None) == ()


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("sorce", "x", "there is no option paper.sorce; paper takes source, tables; did you mean 'source'?"),
        ("source", 3, "paper.source must be text, got 3"),
        ("tables", {"a": 1}, "paper.tables must be a list that is not empty, got {'a': 1}"),
        ("tables", [], "paper.tables must be a list that is not empty, got []"),
        ("tables.0", "table 1", "paper.tables[0] must be a mapping, got 'table 1'; paper.tables[0] takes table, model,"),
        ("tables.0.modl", "x", "there is no option paper.tables[0].modl; paper.tables[0] takes table, model, task,"),
        ("tables.0.modl", "x", "did you mean 'model'?"),
        ("tables.1", {"table": "t", "rows": {}}, "paper.tables[1] lacks model, task, metric, our_metrics;"),
        ("tables.0.table", None, "paper.tables[0].table must be text, got None"),
        ("tables.0.unit", ["%"], "paper.tables[0].unit must be text or null, got ['%']"),
        ("tables.0.model", 7, "paper.tables[0].model must be text, got 7"),
        ("tables.1.model", ["4B", 8], "paper.tables[1].model[1] must be text, got 8"),
        ("tables.0.our_metrics", "kl", "paper.tables[0].our_metrics must be a list that is not empty, got 'kl'"),
        ("tables.0.our_metrics", ["acuracy"], "paper.tables[0].our_metrics must be one of accuracy, pass_at_k,"),
        ("tables.0.our_tasks", [], "paper.tables[0].our_tasks must be a list that is not empty"),
        ("tables.0.budgets", [256, "512"], "paper.tables[0].budgets[1] must be a whole number, got '512'"),
        ("tables.0.budgets", [256, 256], "paper.tables[0].budgets must differ from each other, got 256, 256"),
        ("tables.1.table", "table 1", "paper.tables must differ from each other, got table 1, table 1"),
        ("tables.0.dense", True, "paper.tables[0].dense must hold finite numbers, texts or null for the one model, got"),
        ("tables.0.dense", math.nan, "paper.tables[0].dense must hold finite numbers"),
        ("tables.1.dense", 27.4, "paper.tables[1].dense must hold lists of 2 finite numbers, one a model, texts or null"),
        ("tables.1.dense", [27.4], "paper.tables[1].dense must hold lists of 2 finite numbers"),
        ("tables.0.rows", [], "paper.tables[0].rows must be a mapping of rows by their names, got []"),
        ("tables.0.rows.TOVA", 29.2, "paper.tables[0].rows.TOVA must be a mapping, got 29.2;"),
        ("tables.0.rows.TOVA.value", 1, "there is no option paper.tables[0].rows.TOVA.value;"),
        ("tables.0.rows.TOVA.match", {}, "paper.tables[0].rows.TOVA.match must be a mapping of names and leaves"),
        ("tables.0.rows.TOVA.figures", [1, 2, 3], "paper.tables[0].rows.TOVA.figures must be a list of 2, one a budget"),
        ("tables.0.rows.TOVA.figures", 29.2, "paper.tables[0].rows.TOVA.figures must be a list of 2, one a budget"),
        ("tables.0.rows.TOVA.figures", [1, [2]], "paper.tables[0].rows.TOVA.figures must hold finite numbers"),
        ("tables.1.rows.full.figures", 25.4, "paper.tables[1].rows.full.figures must hold lists of 2 finite numbers"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(path, value, message):
    with pytest.raises((TypeError, ValueError)) as error:
        read_tables(changed(path, value))
    assert message in str(error.value)


def test_text_in_place_of_a_paper_is_refused():
    with pytest.raises(TypeError, match="paper must be a mapping, got 'AMS'; paper takes source, tables"):
        read_tables("AMS")


def test_a_folder_keeps_the_tables_of_all_that_came_to_it(tmp_path):
    folder = RunFolder(tmp_path)
    assert recorded_tables(folder) == ()
    first, second = read_tables(PAPER)
    record_tables(folder, ())
    assert not list(tmp_path.iterdir())
    record_tables(folder, [first])
    record_tables(folder, [second])
    assert recorded_tables(folder) == (first, second)
    # A figure that was set right takes the place of the other.
    (right, _) = read_tables(changed("tables.0.rows.TOVA.figures", [30.2, None]))
    record_tables(folder, [right])
    assert recorded_tables(folder) == (right, second)


def test_nothing_is_written_where_nothing_is_new(tmp_path):
    folder, tables = RunFolder(tmp_path), read_tables(PAPER)
    record_tables(folder, tables)
    before = (tmp_path / "paper.json").stat().st_mtime_ns, (tmp_path / "paper.json").stat().st_ino
    record_tables(folder, tables)
    record_tables(folder, ())
    assert ((tmp_path / "paper.json").stat().st_mtime_ns, (tmp_path / "paper.json").stat().st_ino) == before


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"tables": 3}', '{"tables": [3]}', '{"tables": [{"table": "x"}]}']
)
def test_a_damaged_file_is_said_to_be_and_written_anew(tmp_path, content):
    folder, tables = RunFolder(tmp_path), read_tables(PAPER)
    (tmp_path / "paper.json").write_text(content)
    with pytest.raises(RunError, match="paper.json is damaged, .* the run's command writes it anew"):
        recorded_tables(folder)
    record_tables(folder, tables)
    assert recorded_tables(folder) == tables


@pytest.mark.parametrize("table", paper_tables(), ids=lambda table: table.name)
def test_the_tables_of_the_configuration_survive_a_run_folder(tmp_path, table):
    record_tables(RunFolder(tmp_path), [table])
    assert recorded_tables(RunFolder(tmp_path)) == (table,)
    assert json.loads((tmp_path / "paper.json").read_text())["tables"][0]["source"] == table.source


def test_no_two_tables_have_one_name():
    names = [table.name for table in paper_tables()]
    assert len(set(names)) == len(names) >= 20 and all("arXiv" in name for name in names)


@pytest.mark.parametrize("name", FILES)
def test_a_match_names_choices_and_leaves_that_there_are(name):
    choices = {
        group: {path.stem for path in (CONFIGS / group).glob("*.yaml")} for group in ("press", "scorer", "allocator")
    }
    leaves = {
        f"{group}.{key}"
        for group in choices
        for path in (CONFIGS / group).glob("*.yaml")
        for key in yaml.safe_load(path.read_text())
    }
    for table in read_tables(yaml.safe_load((CONFIGS / "paper" / f"{name}.yaml").read_text())):
        assert table.our_tasks is None or set(table.our_tasks) <= {
            path.stem for path in (CONFIGS / "task").glob("*.yaml")
        }
        for row in table.rows:
            for key, wanted in row.match.items():
                if "." in key:
                    assert key in leaves, (table.name, row.name, key)
                else:
                    assert set(wanted if isinstance(wanted, tuple) else (wanted,)) <= choices[key], (
                        table.name,
                        row.name,
                    )
