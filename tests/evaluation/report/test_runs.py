"""Runs are found, sorted, and shards put together to what the undivided run would be."""

import statistics

import pytest

from kvstitch.evaluation.records import write_text
from kvstitch.evaluation.report import find_runs, sections_of


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
