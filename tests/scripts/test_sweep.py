"""A sweep: every job in its folder, failures told and survived, on one machine, with processes, on a Ray cluster."""

import csv
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "scripts" / "run.py"


def folders(directory="runs"):
    return sorted(path for path in Path(directory).glob("*") if not path.name.startswith("."))


def rows(outcome):
    """State of every job in the closing table, by what was asked."""
    lines = [line for line in outcome.out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {cell[0].partition(" ")[2]: cell[1] for cell in cells if cell[0][:1].isdigit()}


@pytest.fixture
def arguments(tiny_arguments):
    return ("-m", *(text for text in tiny_arguments if not text.startswith("budget=")), "task.num_samples=1")


def test_every_combination_has_its_folder_and_its_line(script, arguments):
    asked = (*arguments, "press=ams,topk", "scorer=tova,keydiff", "budget=24,40")
    outcome = script("run", *asked)
    assert outcome.status == 0, outcome.err
    assert len(folders()) == 8 and all((folder / "metrics.json").exists() for folder in folders())
    assert len(rows(outcome)) == 8 and set(rows(outcome).values()) == {"done"}
    assert rows(outcome)["press=topk scorer=keydiff budget=24"] == "done"
    kept = {folder: (folder / "predictions.jsonl").read_bytes() for folder in folders()}
    again = script("run", *asked)
    assert again.status == 0 and set(rows(again).values()) == {"read from before"}
    assert kept == {folder: (folder / "predictions.jsonl").read_bytes() for folder in folders()}


def test_a_sweep_over_options_is_closed_where_its_output_is(script, arguments):
    outcome = script("run", *arguments, "press=ams,topk", "budget=40", "output_dir=elsewhere/deep")
    assert outcome.status == 0, outcome.err
    assert rows(outcome) == {"press=ams": "done", "press=topk": "done"}
    assert len(folders("elsewhere/deep")) == 2 and not Path("runs").exists()


def test_the_spread_over_seeds_is_written_at_the_end(script, arguments):
    drawn = ("mode=generate", "sampling.do_sample=true", "press.compress_prompt=true")
    outcome = script("run", *arguments, *drawn, "budget=40", "seed=1,2", "press=topk")
    assert outcome.status == 0, outcome.err
    (path,) = Path("runs").glob(".sweeps/*/summary.json")
    assert f"with spread over samples and seeds: {path}" in " ".join(outcome.out.split())
    (section,) = json.loads(path.read_text())["sections"]
    (pressed,) = section["entries"]
    assert pressed["seeds"] == [1, 2]
    each = [json.loads((Path("runs") / folder / "metrics.json").read_text()) for folder in pressed["folders"]]
    assert [run["seeds"] for run in each] == [[1], [2]] and [run["spread_over_seeds"] for run in each] == [None, None]
    seconds = [run["metrics"]["prefill_seconds"]["mean"] for run in each]
    assert pressed["metrics"]["prefill_seconds"]["std_seeds"] == pytest.approx(statistics.stdev(seconds))


def test_a_seed_that_changes_nothing_counts_once_in_the_summary(script, arguments):
    """These records are the same with any seed, and nothing is drawn."""
    assert script("run", *arguments, "budget=40", "seed=1,2", "press=topk").status == 0
    (path,) = Path("runs").glob(".sweeps/*/summary.json")
    (section,) = json.loads(path.read_text())["sections"]
    (pressed,) = section["entries"]
    assert pressed["seeds"] == [1] and pressed["metrics"]["kl"]["n"] == 1


def test_dense_runs_of_a_grid_over_budgets_are_one_row(script, arguments):
    own = [text for text in arguments if not text.startswith("allocator.")]
    assert script("run", *own, "press=dense,topk", "budget=40,48").status == 0
    assert len(folders()) == 4
    outcome = script("report", "runs")
    assert outcome.status == 0, outcome.err
    (section,) = json.loads((Path("runs") / "report" / "summary.json").read_text())["sections"]
    assert [(entry["method"], entry["budget"]) for entry in section["entries"]] == [
        ("dense", ""),
        ("topk tova global_topk", "40 tokens"),
        ("topk tova global_topk", "48 tokens"),
    ]
    # One of the three others measured the dense model; the rest read what it left.
    for text in (
        (Path("runs") / "report" / "report.md").read_text(),
        (Path("runs") / "report" / "report.html").read_text(),
    ):
        assert "of these rows the dense model was read from an earlier run" in text
        assert "seconds an event" in text and "NLL difference" in text


def test_a_glob_reaches_into_a_folder_of_options(script, arguments):
    outcome = script("run", *arguments, "budget=40", "experiment=glob([ams_ablation/no_*,ams_ablation/full])")
    assert outcome.status == 0, outcome.err
    names = ("full", "no_credit", "no_mass_quotas")
    assert rows(outcome) == {f"experiment=ams_ablation/{name}": "done" for name in names}


def test_a_value_may_belong_to_what_is_swept_over(script, arguments, tmp_path):
    """The default task, which Hydra composes before the jobs, has no path."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 17}" for i in range(900)))
    own = [a for a in arguments if not a.startswith(("task", "allocator."))]
    rows_of_a_table = "experiment=community_ablation/full,community_ablation/chunks"
    task = [f"task.path={text}", "task.length=200", "task.prefill_tokens=180", "task.num_samples=1"]
    outcome = script("run", *own, rows_of_a_table, "budget=64", "decode_tokens=20", *task)
    assert outcome.status == 0, outcome.err
    assert list(rows(outcome).values()) == ["done", "done"]
    outcome = script("run", *own, rows_of_a_table, "budget=64", "task.pth=x", *task)
    assert outcome.status == 1 and "there is no option task.pth" in outcome.err and "did you mean 'path'" in outcome.err


@pytest.mark.parametrize(
    "glob, valid",
    [("ams_ablatoin/*", "did you mean 'ams_ablation/*'"), ("zz*", "those that match some: *, ams_ablation")],
)
def test_a_glob_that_matches_nothing_is_refused(script, arguments, glob, valid):
    outcome = script("run", *arguments, f"experiment=glob({glob})")
    assert outcome.status == 1 and f"experiment=glob({glob}) matches no experiment" in outcome.err
    assert valid in outcome.err and not folders()


def test_a_failing_job_leaves_its_traceback_and_the_others_go_on(script, arguments):
    outcome = script("run", *arguments, "budget=2,40")
    assert outcome.status == 1
    assert rows(outcome) == {"budget=2": "failed", "budget=40": "done"}
    assert outcome.err.count("error: ") == 1 and "error: 1 of 2 jobs have no complete result" in outcome.err
    (failed,) = [folder for folder in folders() if "-2-" in folder.name]
    assert [path.name for path in failed.iterdir()] == ["error.txt"]
    text = (failed / "error.txt").read_text()
    assert text.startswith("`budget` must hold the sinks") and "Traceback" in text
    assert "at least 5 tokens, got 2" in " ".join(outcome.out.split()) and f"{failed}/error.txt" in outcome.out


def test_on_error_stop_runs_no_further_job(script, arguments):
    outcome = script("run", *arguments, "budget=2,40", "on_error=stop")
    assert outcome.status == 1 and rows(outcome) == {"budget=2": "failed", "budget=40": "not run"}
    assert len(folders()) == 1
    # What follows a failure does not change what a run is.
    assert rows(script("run", *arguments, "budget=40,24")) == {"budget=40": "done", "budget=24": "done"}
    assert rows(script("run", *arguments, "budget=40,24", "on_error=stop"))["budget=40"] == "read from before"


def test_a_bug_in_one_job_is_told_with_its_traceback(script, arguments, monkeypatch):
    from kvstitch.evaluation import runner

    original, seen = runner.summary, []

    def broken(records, *others):
        seen.append(1)
        return original(records, *others) if len(seen) > 1 else records["nothing"]

    monkeypatch.setattr(runner, "summary", broken)
    outcome = script("run", *arguments, "budget=24,40")
    assert outcome.status == 1 and rows(outcome) == {"budget=24": "failed", "budget=40": "done"}
    (failed,) = [folder for folder in folders() if (folder / "error.txt").exists()]
    assert "TypeError" in (failed / "error.txt").read_text() and "in broken" in (failed / "error.txt").read_text()
    # The sample was finished; the next try needs only to sum up, and the traceback is gone with its cause.
    again = script("run", *arguments, "budget=24,40")
    assert again.status == 0 and rows(again) == {"budget=24": "done", "budget=40": "read from before"}
    assert not (failed / "error.txt").exists()


def test_the_folder_of_a_sweep_is_one(script, arguments):
    outcome = script("run", *arguments, "budget=40", "output_dir=one,other")
    assert outcome.status == 1 and "cannot be swept over: got output_dir=one,other" in outcome.err
    assert not Path("one").exists() and not Path("runs").exists()


def test_on_error_has_two_values(script, arguments):
    outcome = script("run", *arguments[1:], "budget=40", "on_error=stp")
    assert (
        outcome.status == 1 and "on_error must be one of continue, stop, got 'stp'; did you mean 'stop'?" in outcome.err
    )


def test_a_bad_option_refuses_the_whole_sweep(script, arguments):
    outcome = script("run", *arguments, "budget=24,40", "bugdet=1")
    assert outcome.status == 1 and "there is no option bugdet" in outcome.err and outcome.out == ""
    assert not folders()


def test_shards_share_the_samples(script, tiny_arguments):
    assert script("run", "-m", *tiny_arguments, "task.shard=0,1", "task.num_shards=2").status == 0
    assert script("run", *tiny_arguments).status == 0
    ids = [
        {json.loads(line)["id"] for line in (folder / "predictions.jsonl").read_text().splitlines()}
        for folder in folders()
    ]
    whole = max(ids, key=len)
    parts = [part for part in ids if part != whole]
    assert len(parts) == 2 and parts[0] | parts[1] == whole and not parts[0] & parts[1]
    assert sorted(map(len, parts)) == [1, 2]


def test_more_workers_than_samples_make_the_undivided_run(script, tiny_arguments):
    """Three samples for four workers: the one without any finishes, too, and the report has all of them."""
    assert script("run", "-m", *tiny_arguments, "task.shard=0,1,2,3", "task.num_shards=4").status == 0
    assert len(folders()) == 4
    outcome = script("report", "runs")
    assert outcome.status == 0, outcome.err
    with (Path("runs") / "report" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["n"] for row in rows if row["metric"] == "accuracy"} == {"3"}


def test_a_shard_that_does_not_exist_is_refused(script, tiny_arguments):
    outcome = script("run", *tiny_arguments, "task.shard=2", "task.num_shards=2")
    assert outcome.status == 1 and "task.shard must be below task.num_shards=2, got 2" in outcome.err
    assert not Path("runs").exists() or not folders()


def run_apart(directory, *arguments, timeout=580):
    """A process of its own: launchers pickle what `python run.py` defines."""
    command = [sys.executable, str(RUN), *arguments]
    # A busy machine takes its time to start a cluster.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "RAY_raylet_start_wait_time_s": "120"}
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout, env=environment)


def check_parallel(done, directory):
    assert done.returncode == 1, done.stderr
    states = rows(type("Outcome", (), {"out": done.stdout}))
    assert states == {"budget=2": "failed", "budget=24": "done", "budget=40": "done"}, done.stderr
    written = folders(directory / "runs")
    assert len(written) == 3 and sum((folder / "metrics.json").exists() for folder in written) == 2
    (failed,) = [folder for folder in written if (folder / "error.txt").exists()]
    assert "at least 5 tokens, got 2" in (failed / "error.txt").read_text()


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None,
    reason="the joblib launcher is not installed",
)
def test_jobs_in_parallel_on_one_machine(tmp_path, arguments):
    done = run_apart(tmp_path, *arguments, "budget=2,24,40", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    check_parallel(done, tmp_path)
    for number in (1, 2):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"job {number}: ")]
        assert any("run folder: " in line for line in lines) and any("[1/1] records-000001" in line for line in lines)


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_jobs_on_a_ray_cluster_of_two_workers(tmp_path, arguments):
    done = run_apart(tmp_path, *arguments, "budget=2,24,40", "hydra/launcher=ray", "hydra.launcher.init.num_cpus=2")
    check_parallel(done, tmp_path)


SLURM = {
    # Runs every job of the array at once, with what SLURM tells a job about itself.
    "sbatch": """
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
open(os.environ["KEPT_SBATCH"], "w").write(text)
first, last = re.search(r"#SBATCH --array=(\\d+)-(\\d+)", text).groups()
for index in range(int(first), int(last) + 1):
    told = {"SLURM_JOB_ID": f"10{index}", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index), "SLURM_NTASKS": "1"}
    told |= {name: "0" for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")}
    told |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["bash", sys.argv[1]], env=os.environ | told, start_new_session=True, **quiet)
print("Submitted batch job 7")
""",
    "srun": """
import os, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words = words[2 if words[0] in ("--output", "--error") else 1:]
os.execvp(words[0], words)
""",
    "sacct": "",
}


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None,
    reason="the submitit launcher is not installed",
)
def test_jobs_through_slurms_commands(tmp_path, arguments, monkeypatch):
    """Without SLURM: its three commands are stand-ins that run what they are given."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, program in SLURM.items():
        (commands / name).write_text(f"#!{sys.executable}\n{program}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KEPT_SBATCH", str(tmp_path / "kept.sh"))
    done = run_apart(tmp_path, *arguments, "budget=2,24,40", "hydra/launcher=slurm", "hydra.launcher.partition=gpu")
    check_parallel(done, tmp_path)
    asked = (tmp_path / "kept.sh").read_text()
    for line in ("--partition=gpu", "--time=720", "--mem=32GB", "--cpus-per-task=4", "--array=0-2%3"):
        assert f"#SBATCH {line}" in asked, asked
