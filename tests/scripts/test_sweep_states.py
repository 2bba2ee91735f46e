"""What a sweep tells of its jobs, in its states, its table and its summary, whatever fails on the way; nothing is evaluated."""

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from filelock import FileLock

from kvstitch.evaluation import records
from kvstitch.evaluation.records import METRICS
from kvstitch.evaluation.summary import summary

STATES = Path("states")
FIXED = f"hydra.sweep.dir={STATES}"


@pytest.fixture
def sweep(script, monkeypatch):
    """`sweep(*arguments, **acts)` -> outcome; every job finishes at once, but where `acts` says for its seed what to do.

    An act is an error to raise, or a function of the run folder: called when the run is finished if it is named `late`.
    """
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments, seed="1,2", **acts):
        def evaluate(plain, choices, folder, dense_folder=None, label=""):
            act = acts.get(f"seed_{plain['seed']}")
            if isinstance(act, BaseException):
                raise act
            labels = {name: choices[name] for name in ("press", "task", "scorer", "allocator")}
            labels |= {name: plain[name] for name in ("mode", "interval", "seed", "speed_tokens")}
            labels |= {"model": "none", "budget": str(plain["budget"]), "num_sinks": 4, "num_recent": 8}
            with folder.opened(yaml.safe_dump(plain)):
                record = {"id": "a", "metrics": {"accuracy": 1.0, "kl": 0.25}}
                folder.append(record)
                metrics = summary([record], labels)
                folder.write_json(METRICS, metrics)
                if act is not None:
                    act(folder)
            return metrics

        monkeypatch.setitem(sys.modules, "run_job", SimpleNamespace(evaluate=evaluate))
        return script("run", "-m", f"seed={seed}", *arguments)

    return call


def rows(outcome):
    """Cells of every line of the closing table."""
    lines = [line for line in outcome.out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def run_of(seed):
    """The run folder of a seed, as its configuration names it."""
    for path in Path("runs").glob("*/config.yaml"):
        if yaml.safe_load(path.read_text())["seed"] == seed:
            return path.parent
    raise AssertionError(f"no run of seed {seed}")


def test_states_of_an_earlier_sweep_in_the_same_folder_count_nothing(sweep):
    first = sweep(FIXED, seed="1,2,3", seed_1=KeyError("a bug"))
    assert first.status == 1 and [row[1] for row in rows(first)] == ["failed", "done", "done"]
    other = STATES / "job-offers.json"
    other.write_text("not a state")
    # An old failure would stop it, and old states would stand for jobs that are not run.
    second = sweep(FIXED, "on_error=stop", seed="4,5", seed_4=KeyError("a bug"))
    assert [row[1] for row in rows(second)] == ["failed", "not run"]
    third = sweep(FIXED, "on_error=stop", seed="2,6")
    assert third.status == 0 and [row[1] for row in rows(third)] == ["read from before", "done"], third.err
    assert sorted(path.name for path in STATES.glob("job-*.json")) == ["job-00000.json", "job-00001.json", other.name]


def test_two_sweeps_at_once_in_one_folder_are_refused(sweep):
    assert sweep(FIXED).status == 0
    kept = (STATES / "job-00000.json").read_bytes()
    with FileLock(STATES / ".sweep.lock"):
        outcome = sweep(FIXED)
    assert outcome.status == 1 and f"hydra.sweep.dir={STATES} is in use by another sweep" in outcome.err
    assert (STATES / "job-00000.json").read_bytes() == kept and not rows(outcome)
    assert sweep(FIXED).status == 0


@pytest.mark.parametrize("content", ["{not json", "[1]", "{}", '{"metrics": {"accuracy": 3, "kl": {"mean": "much"}}}'])
def test_a_damaged_metrics_file_costs_its_own_figures_alone(sweep, content):
    outcome = sweep(seed_1=lambda folder: (folder.path / METRICS).write_text(content))
    assert [row[1:] for row in rows(outcome)] == [
        ["done", "", "", ""],
        ["done", "100.0 %", "", "0.2500"],
    ], outcome.err
    assert outcome.status == 0 and "Traceback" not in outcome.err
    if "accuracy" not in content:
        assert f"0 done: {run_of(1) / METRICS} is damaged" in outcome.out
    # Found so by a later sweep, it is what the job fails with.
    if content == "{not json":
        again = sweep()
        assert again.status == 1 and [row[1] for row in rows(again)] == ["failed", "read from before"]
        assert again.out.count("is damaged") == 1


def test_brackets_of_an_option_are_shown_as_they_are(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    from rich.console import Console
    from sweep import Job
    from sweep_table import print_jobs

    asked = ("task.cue='[/b]'", "x=[mean,max]", "x=[bold]")
    print_jobs([Job((text,), "failed", None, f"{text} is wrong") for text in asked], Console())
    out = capsys.readouterr().out
    for number, text in enumerate(asked):
        assert f"│ {number} {text} " in out and f"{number} failed: {text} is wrong" in out


def test_a_summary_that_cannot_be_made_costs_nothing_else(sweep, monkeypatch):
    import sweep_summary

    def broken(*_):
        raise KeyError("mode\nof a run")

    monkeypatch.setattr(sweep_summary, "sections_of", broken)
    outcome = sweep()
    assert outcome.status == 0 and [row[1] for row in rows(outcome)] == ["done", "done"]
    assert outcome.err.count("has no summary of the sweep: KeyError: ") == 1 and "Traceback" not in outcome.err
    # Neither what failed nor an interruption is replaced.
    outcome = sweep(seed="3,4", seed_3=ValueError("odd"))
    assert outcome.status == 1 and "error: 1 of 2 jobs have no complete result" in outcome.err
    outcome = sweep(seed="5,6", seed_5=KeyboardInterrupt())
    assert outcome.status == 130 and [row[1] for row in rows(outcome)] == ["lost", "not run"]


def test_the_summary_names_the_jobs_without_a_result_as_the_report_does(sweep, script):
    def late(folder):
        (folder.path / METRICS).unlink()
        raise ValueError("after the samples")

    # Two of the jobs cannot be composed, so that they have no folder.
    outcome = sweep(FIXED, "reuse_dense=true,3", seed_2=late)
    assert outcome.status == 1, outcome.err
    told = json.loads((STATES / "summary.json").read_text())
    (section,) = told["sections"]
    assert section["entries"][0]["folders"] == [run_of(1).name]
    found = {" ".join(entry["overrides"]).lower(): (entry["state"], entry["reason"]) for entry in told["not_in_report"]}
    assert len(found) == 3 and {state for state, _ in found.values()} == {"failed"}
    assert found["seed=2 reuse_dense=true"][1] == "failed: ValueError: after the samples"
    assert "reuse_dense" in found["seed=1 reuse_dense=3"][1]
    assert script("report", "runs", "--output", "report", "--no-papers").status == 0
    report = json.loads(Path("report/summary.json").read_text())
    assert report["sections"] == told["sections"]
    same = [{name: entry[name] for name in ("folder", "reason")} for entry in told["not_in_report"]]
    assert all(entry in same for entry in report["not_in_report"]) and report["not_in_report"]


def test_a_sweep_without_any_result_has_a_summary_that_says_why(sweep):
    outcome = sweep(FIXED, "on_error=stop", seed_1=KeyError("a bug"))
    assert outcome.status == 1 and "with spread" not in outcome.out
    told = json.loads((STATES / "summary.json").read_text())
    assert told["sections"] == []
    assert [(entry["state"], entry["reason"]) for entry in told["not_in_report"]] == [
        ("failed", "failed: KeyError: 'a bug'"),
        ("not run", "not run"),
    ]


def test_a_full_disk_is_named_and_is_no_death(sweep, monkeypatch):
    """Full as soon as the first run is finished: its state cannot be written, nor anything of the next job."""
    real = records.os.fsync

    def full(descriptor):
        if any(Path("runs").glob(f"*/{METRICS}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(records.os, "fsync", full)
    outcome = sweep(FIXED)
    assert outcome.status == 1 and [row[1] for row in rows(outcome)] == ["done", "failed"]
    for number, state in enumerate(("done", "failed")):
        assert f"{number} {state}: cannot write {STATES}/job-0000{number}.json: No space left on device" in outcome.out
    assert "launcher" not in outcome.err and "died" not in outcome.out and "out of memory" not in outcome.out
    assert "error: 1 of 2 jobs have no complete result" in outcome.err
    assert "has no summary of the sweep: RunError: cannot write" in outcome.err


def test_a_run_folder_that_is_a_file_fails_its_job_alone(sweep):
    assert sweep().status == 0
    folder = run_of(1)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.touch()
    outcome = sweep()
    assert outcome.status == 1 and [row[1] for row in rows(outcome)] == ["failed", "read from before"]
    assert f"0 failed: {folder} is a file where a folder is needed: " in outcome.out
    assert "or give another output_dir (error.txt could not be written: " in outcome.out
    assert "launcher" not in outcome.err


class Odd(BaseException):
    """No Exception, and no interruption either."""


def test_who_raises_what_is_no_exception_fails_alone(sweep):
    outcome = sweep(seed_1=Odd("of a library"))
    assert outcome.status == 1 and [row[1] for row in rows(outcome)] == ["failed", "done"]
    assert "0 failed: Odd: of a library" in outcome.out


def test_a_job_that_died_is_not_called_left_out(sweep, monkeypatch):
    """Its process died beside others, and when it is launched again one of those is lost already."""
    sweep(FIXED)
    from sweep import SweepFolder

    original = SweepFolder.any_failed

    def any_failed(self):
        # As the first round left it.
        self.write(1, "running", str(run_of(2)))
        return original(self)

    monkeypatch.setattr(SweepFolder, "any_failed", any_failed)
    outcome = sweep(FIXED, "on_error=stop", "budget=64", seed_1=KeyError("a bug"))
    assert [row[1] for row in rows(outcome)] == ["failed", "lost"]
    reason = "its process died while others ran beside it; not tried again because of on_error=stop"
    assert f"1 lost: {reason}" in outcome.out and (run_of(2) / "error.txt").read_text().startswith(reason)


def test_a_finished_run_is_shown_for_its_own_configuration_only(sweep):
    assert sweep().status == 0
    config = run_of(2) / "config.yaml"
    config.write_text(config.read_text().replace("budget: 256", "budget: 257"))
    again = sweep()
    assert again.status == 1 and [row[1] for row in rows(again)] == ["read from before", "failed"]
    assert "is not the configuration of this run" in again.out


def test_a_job_that_ended_but_could_not_tell_is_done(sweep):
    """As when its process is ended between its last sample and its last word."""
    assert sweep(FIXED, seed="1,2,3").status == 0
    (run_of(2) / METRICS).unlink()
    failed = json.loads((run_of(3) / METRICS).read_text())
    (run_of(3) / METRICS).write_text(json.dumps(failed | {"failed_samples": ["a"]}))
    states = sys.modules["sweep"]
    folder = states.SweepFolder(STATES)
    for number in range(3):
        folder.write(number, states.RUNNING, str(run_of(number + 1)))
    jobs = states.read_jobs(folder, [("seed=1",), ("seed=2",), ("seed=3",)], states.INTERRUPTED)
    assert [job.state for job in jobs] == ["done", "lost", "lost"]
    assert "the same command goes on" in jobs[1].reason and jobs[0].reason is None
