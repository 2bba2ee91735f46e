"""Runs are found, sorted, and shards put together to what the undivided run would be."""

import json
import os
import shutil
import statistics

import pytest

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import find_runs, sections_of
from kvstitch.evaluation.report.tables import markdown, summary_json


def test_finished_runs_are_found_and_others_named(make_run):
    good, failed, started = make_run(), make_run(budget=64), make_run(budget=128)
    (failed / "metrics.json").unlink()
    write_text(failed / "error.txt", "disk full\n\nTraceback")
    (started / "metrics.json").unlink()
    (good.parent / "report").mkdir()
    runs, problems = find_runs([good.parent])
    assert [run.path for run in runs] == [good]
    assert {problem.path: problem.reason for problem in problems} == {
        failed: "failed: disk full",
        started: "not finished; give its command again",
    }
    assert [run.path for run in find_runs([good, good])[0]] == [good]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_runs([good.parent / "nowhere"])


def test_one_damaged_folder_leaves_the_others_in_the_report(make_run):
    """Torn, empty or foreign, whatever the file."""

    def torn(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    good = make_run()
    faults = {
        "metrics.json is damaged": lambda run: torn(run / "metrics.json"),
        "config.yaml is damaged": lambda run: torn(run / "config.yaml"),
        "run_meta.json is damaged": lambda run: write_text(run / "run_meta.json", "["),
        "damaged: metrics.json has no run, num_samples": lambda run: write_text(run / "metrics.json", "{}"),
        "damaged: config.yaml has no model, task": lambda run: write_text(run / "config.yaml", "task:"),
        "is no run folder: it has no config.yaml": lambda run: (
            (run / "config.yaml").unlink(),
            write_text(run / "error.txt", ""),
        ),
        "line 1, is not a record of a sample": lambda run: write_text(run / "predictions.jsonl", "x\n"),
        "holds 3 of the 4 samples": lambda run: torn_line(run / "predictions.jsonl"),
        "sample 'a' of predictions.jsonl has neither": lambda run: write_text(
            run / "predictions.jsonl", "".join(f'{{"id": "{name}"}}\n' for name in "abcd")
        ),
        "not finished; give its command again": lambda run: (
            (run / "metrics.json").unlink(),
            write_text(run / "error.txt", "\n"),
        ),
    }

    def torn_line(path):
        path.write_bytes(path.read_bytes()[:-20])

    folders = [make_run(budget=index) for index in range(1, len(faults) + 1)]
    for folder, damage in zip(folders, faults.values()):
        damage(folder)
    before = {path: path.read_bytes() for path in good.parent.rglob("*") if path.is_file()}
    runs, problems = find_runs([good.parent])
    assert [run.path for run in runs] == [good]
    found = {problem.path: problem.reason for problem in problems}
    for folder, reason in zip(folders, faults):
        assert reason in found[folder]
    # Nothing was mended: a process may be at work there.
    assert {path: path.read_bytes() for path in good.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["kept_positions.npz", "regions.npz"])
def test_torn_arrays_are_named_and_the_run_stays(make_run, name):
    folder = make_run() if name.startswith("kept") else make_run(press="community", allocator="community")
    assert find_runs([folder])[1] == []
    (folder / name).write_bytes((folder / name).read_bytes()[:-40])
    (run,), (problem,) = find_runs([folder])
    assert run.path == problem.path == folder and problem.reason == f"{name} is damaged, so nothing is drawn of it"


def test_shards_become_the_undivided_run(make_run):
    whole = make_run(samples=7, failed=("s3",), skipped=("line 3: no prompt",))
    undivided = find_runs([whole])[0][0]
    shards = [
        make_run(samples=7, failed=("s3",), skipped=("line 3: no prompt",), shard=index, num_shards=3)
        for index in range(3)
    ]
    (merged,), problems = find_runs(shards)
    assert not problems
    assert [record["id"] for record in merged.records] == [f"s{index}" for index in range(7)]
    assert merged.records == undivided.records and merged.config == undivided.config
    assert merged.summary == undivided.summary and merged.summary["num_samples"] == 7


def test_a_missing_shard_is_named_and_nothing_is_merged(make_run):
    shards = [make_run(shard=index, num_shards=3) for index in (0, 2)]
    runs, problems = find_runs(shards)
    assert not runs and [problem.reason for problem in problems] == [
        "shard 0 of 3; 1 of them not finished",
        "shard 2 of 3; 1 of them not finished",
    ]


def test_a_section_is_a_task_a_model_and_a_mode(make_run):
    make_run()
    make_run(budget=64)
    folder = make_run(length=4096).parent
    sections = sections_of(find_runs([folder])[0])
    assert sorted(section.title for section in sections) == [
        "needle · tiny · replay · length=2048",
        "needle · tiny · replay · length=4096",
    ]
    assert sorted(len(section.entries) for section in sections) == [1, 2]


def test_a_title_names_no_more_options_than_it_must(make_run):
    """Sections of other tasks have other options; those of one task differ here in two, of which one is enough."""
    make_run(task="text", length=100, config={"task.chat": True})
    make_run(task="text", length=200, config={"task.chat": False})
    folder = make_run(task="needle", config={"task.keys": 3, "task.path": "x/y.txt"}).parent
    sections = {section.title: section.options for section in sections_of(find_runs([folder])[0])}
    assert sections == {
        "needle · tiny · replay": "",
        "text · tiny · replay · length=100": "length=100, chat=True",
        "text · tiny · replay · length=200": "length=200, chat=False",
    }


def test_methods_with_the_same_name_are_told_apart_by_what_differs(make_run):
    make_run(leaves={"segment_mass": 0.1, "min_keep": 1})
    folder = make_run(leaves={"segment_mass": 0.05, "min_keep": 1}).parent
    (section,) = sections_of(find_runs([folder])[0])
    assert sorted(section.methods) == [
        "ams tova segment_quota (segment_mass=0.05)",
        "ams tova segment_quota (segment_mass=0.1)",
    ]


def test_seeds_are_pooled_and_their_spread_is_told(make_run):
    folders = [make_run(seed=seed) for seed in (1, 2, 3)]
    (section,) = sections_of(find_runs(folders)[0])
    (entry,) = section.entries
    value = entry.value("kl")
    each = [[record["metrics"]["kl"] for record in run.records] for run in entry.runs]
    pooled = [number for numbers in each for number in numbers]
    assert (value.n, value.seeds) == (12, 3) and value.mean == pytest.approx(statistics.fmean(pooled))
    assert value.std == pytest.approx(statistics.stdev(pooled))
    assert value.seeds_std == pytest.approx(statistics.stdev(map(statistics.fmean, each)))
    assert value.error == pytest.approx(value.std / 12**0.5)
    assert entry.value("nothing") is None


def test_failed_samples_count_in_no_figure(make_run):
    (section,) = sections_of(find_runs([make_run(failed=("s1",))])[0])
    assert section.entries[0].value("kl").n == 3


@pytest.mark.parametrize("budget, number", [(256, 256.0), (0.25, 0.25), ("64MiB", 64 * 2**20), ("1.5 gb", 1.5e9)])
def test_budgets_are_numbers_on_the_axis(make_run, budget, number):
    (section,) = sections_of(find_runs([make_run(press="topk", budget=budget)])[0])
    assert section.budgets[0][0] == number


@pytest.fixture
def same_for_all_seeds(make_run):
    """`same_for_all_seeds(seed, …)` -> a run whose samples and values are those of seed 1, as in a replay of texts that are not
    drawn; only what was measured is its own."""

    def make(seed, change=None, **names):
        folder, first = make_run(seed=seed, **names), make_run(seed=1, budget=1000, **names)
        records = [json.loads(line) for line in (first / "predictions.jsonl").read_text().splitlines()]
        for record in records:
            record["metrics"] |= {"prefill_seconds": float(seed), "dense_reused": float(seed > 1)}
            record["metrics"] |= {"peak_process_bytes": seed, "decode_tokens_per_second": float(seed)}
            record["metrics"] |= change or {}
        write_text(folder / "predictions.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        shutil.rmtree(first)
        return folder

    return make


def test_seeds_that_change_nothing_count_once_and_are_named(same_for_all_seeds):
    one, two, three = (same_for_all_seeds(seed) for seed in (1, 2, 3))
    (section,) = sections_of(find_runs([one, two, three])[0])
    (alone,) = sections_of(find_runs([one])[0])
    (entry,) = section.entries
    assert entry.value("kl") == alone.entries[0].value("kl")
    assert (entry.value("kl").n, entry.value("kl").seeds, entry.value("kl").seeds_std) == (4, 1, None)
    line = (
        "ams tova segment_quota, 256 tokens: seeds 1, 2 and 3 gave the same samples and the same values; counted once"
    )
    assert line in markdown([section]) and "counted once" not in markdown([alone])
    (found,) = json.loads(summary_json([section]))["sections"][0]["entries"]
    assert (found["seeds"], found["folders"], found["samples"]) == ([1], [one.name], 4)
    assert found["repeats"] == [
        {"seed": seed, "folder": folder.name, "same_as": one.name} for seed, folder in ((2, two), (3, three))
    ]


def test_seeds_of_the_task_alone_are_named_as_such(same_for_all_seeds):
    folders = [same_for_all_seeds(seed, config={"task.seed": seed + 6}) for seed in (1, 2)]
    for folder in folders:
        config = json.loads((folder / "config.yaml").read_text())
        write_text(folder / "config.yaml", json.dumps(config | {"seed": 7}))
    (section,) = sections_of(find_runs(folders)[0])
    assert "seeds 7 and 7 (task.seed=8) gave the same samples" in markdown([section])


def test_a_seed_that_changes_any_value_counts(same_for_all_seeds):
    folders = [same_for_all_seeds(1), same_for_all_seeds(2, {"kl": 0.25})]
    (section,) = sections_of(find_runs(folders)[0])
    assert section.entries[0].value("accuracy").n == 8 and "counted once" not in markdown([section])


def test_a_copied_folder_is_named_and_counts_once(make_run, tmp_path):
    folder = make_run()
    copy = tmp_path / "copies" / "other"
    shutil.copytree(folder, copy)
    runs, (problem,) = find_runs([folder.parent, copy])
    assert [run.path for run in runs] == [folder] and problem.path == copy
    assert problem.reason == f"a copy of {folder}: it has the same configuration, which counts once"
    assert f"- a copy of {folder}: it has the same configuration, which counts once: `other`" in markdown(
        sections_of(runs), [problem]
    )


def test_of_copies_the_one_with_fewer_failures_counts(make_run, tmp_path):
    folder = make_run(failed=("s0",))
    shutil.move(folder, tmp_path / "first")
    again = make_run()
    runs, (problem,) = find_runs([tmp_path / "first", again])
    assert [run.path for run in runs] == [again] and problem.path == tmp_path / "first"


def test_a_folder_given_twice_is_no_copy(make_run, tmp_path, monkeypatch):
    folder = make_run()
    monkeypatch.chdir(tmp_path)
    runs, problems = find_runs([folder, folder.parent, folder.relative_to(tmp_path)])
    assert [run.path for run in runs] == [folder] and not problems
    os.symlink(folder, tmp_path / "link")
    assert find_runs([folder, tmp_path / "link"])[1] == []


def test_shards_beside_the_undivided_run_or_twice_are_named(make_run, tmp_path):
    shards = [make_run(shard=index, num_shards=2) for index in range(2)]
    shutil.copytree(shards[1], tmp_path / "copies" / "other")
    (merged,), (problem,) = find_runs([*shards, tmp_path / "copies"])
    assert len(merged.records) == 4 and problem.path.name == "other"
    assert problem.reason.startswith(f"a copy of {shards[1]}: ")
    whole = make_run()
    (run,), problems = find_runs([*shards, whole])
    assert run.path == whole and [problem.path for problem in problems] == shards
    assert {problem.reason for problem in problems} == {
        f"a copy of {whole}: it has the same configuration, which counts once"
    }
