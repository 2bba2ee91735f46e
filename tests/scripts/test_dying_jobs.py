"""Jobs whose process dies: they alone are lost, and whoever ran beside them is launched again."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

# Dies, raises or hangs where a scorer is made, once a job beside it is at work, too.
PRESSES = """
import os, time
from pathlib import Path

def _wait():
    (sweep,) = Path("runs/.sweeps").glob("*")
    while len(list(sweep.glob("job-*.json"))) < 2:
        time.sleep(0.05)

def dying():
    if next(Path("runs/.sweeps").glob("*/job-00000.json"), None) is not None:
        _wait()
    os._exit(3)

def raising():
    raise KeyError("a bug")

def hanging():
    Path(f"at-work-{os.getpid()}").touch()
    time.sleep(300)

def hanging_too():
    hanging()
"""


@pytest.fixture
def rounds(monkeypatch, tmp_path):
    """`rounds(launch, count)` -> what `launch_in_rounds` returns, states and reasons of the jobs."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import relaunch
    from sweep import SweepFolder, read_jobs

    sweep = SweepFolder(tmp_path / "sweep")

    def run(launch, count, first=0):
        asked = [[f"n={number}"] for number in range(first, first + count)]
        returns = relaunch.launch_in_rounds(lambda jobs, number: launch(sweep, jobs, number), asked, first, sweep)
        jobs = read_jobs(sweep, [[]] * first + asked)[first:]
        return returns, [job.state for job in jobs], [job.reason for job in jobs]

    return run


class Pool:
    """Runs two jobs at a time; one that dies takes along whoever is beside it, and those behind are not begun.

    Args:
        deadly: numbers of the jobs that die.
        early: job that is begun before its turn.
        stop: whether jobs are left out after a failure.
        folders: of the jobs' runs, as far as they get to know it.
        stillborn: so many times, in a row, a process dies before it begins a job.
    """

    def __init__(self, deadly=(), early=None, stop=False, folders=None, stillborn=0):
        self.deadly, self.early, self.stop, self.folders = deadly, early, stop, folders or {}
        self.stillborn = stillborn
        self.launched = []

    def __call__(self, sweep, jobs, first):
        numbers = list(range(first, first + len(jobs)))
        assert [job for (job,) in jobs] == [f"n={number}" for number in numbers]
        self.launched.append(numbers)
        if self.stillborn:
            self.stillborn -= 1
            raise BrokenProcessPool("A worker was terminated.\nThe exit codes are {SIGKILL(-9)}")
        numbers = sorted(numbers, key=lambda number: number != self.early)
        for start in range(0, len(numbers), 2):
            pair = numbers[start : start + 2]
            for number in pair:
                if self.stop and sweep.any_failed():
                    sweep.leave_out(number)
                else:
                    sweep.write(number, "running", self.folders.get(number))
            at_work = [number for number in pair if sweep.read(number)["state"] == "running"]
            if set(at_work) & set(self.deadly):
                raise BrokenProcessPool("A worker was terminated.\nThe exit codes are {EXIT(3), SIGKILL(-9)}")
            for number in at_work:
                sweep.write(number, "done")
        return [f"returned {number}" for number in sorted(numbers)]


def test_nothing_is_launched_twice_where_nobody_dies(rounds):
    pool = Pool()
    assert rounds(pool, 3, first=4) == (["returned 4", "returned 5", "returned 6"], ["done"] * 3, [None] * 3)
    assert pool.launched == [[4, 5, 6]]


def test_only_who_dies_alone_is_lost(rounds, tmp_path, capsys):
    pool = Pool(deadly=(1, 6), folders={1: str(tmp_path / "run")})
    _, states, reasons = rounds(pool, 9)
    assert [number for number, state in enumerate(states) if state != "done"] == [1, 6]
    assert {states[1], states[6]} == {"lost"}
    # Who was at work goes alone, the others together.
    assert pool.launched == [[*range(9)], [0], [1], [*range(2, 9)], [6], [7], [8]]
    assert "died, also when nothing ran beside it (exit status 3, signal SIGKILL, which is what the" in reasons[1]
    told = (tmp_path / "run" / "error.txt").read_text()
    assert told.startswith(reasons[1]) and "no traceback" in told
    err = capsys.readouterr().err
    assert (
        "a process died while at work on jobs 0, 1: again, one at a time" in err
        and "now what had not begun: job 8" in err
    )


def test_jobs_that_are_begun_out_of_turn_keep_their_numbers(rounds):
    pool = Pool(deadly=(0,), early=3)
    assert rounds(pool, 6)[1] == ["lost", *["done"] * 5]
    assert pool.launched == [[0, 1, 2, 3, 4, 5], [0], [3], [1, 2], [4, 5]]


@pytest.mark.parametrize("deadly, expected", [(0, ["lost", "lost"]), (1, ["done", "lost"])])
def test_stop_leaves_out_what_is_not_done_when_one_is_lost(rounds, deadly, expected, tmp_path):
    """Not before: of two that shared a broken pool it is not known which one broke it. Both of their deaths are told."""
    _, states, reasons = rounds(Pool(deadly=(deadly,), stop=True, folders={1: str(tmp_path / "run")}), 6)
    assert states == [*expected, *["not run"] * 4]
    if deadly == 0:
        assert reasons[1].startswith("its process died while others ran beside it; not tried again because of on_error")
        assert (tmp_path / "run" / "error.txt").read_text().startswith(reasons[1])


def test_a_process_that_dies_before_any_job_began_is_tried_once_more(rounds, capsys):
    pool = Pool(stillborn=1)
    assert rounds(pool, 2)[1] == ["done", "done"] and pool.launched == [[0, 1], [0, 1]]
    assert "a process died before any job had begun: once more" in capsys.readouterr().err


def test_after_two_such_deaths_in_a_row_the_launcher_gives_up(rounds):
    pool = Pool(stillborn=2)
    with pytest.raises(BrokenProcessPool, match="terminated"):
        rounds(pool, 2)
    assert pool.launched == [[0, 1], [0, 1]]


def test_a_disk_that_refuses_the_launcher_is_no_death(rounds, capsys):
    def full(sweep, jobs, first):
        sweep.write(first, "running")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _, states, reasons = rounds(full, 1)
    assert states == ["lost"] and "No space left on device" in reasons[0] and "died" not in reasons[0]
    err = capsys.readouterr().err
    assert (
        "the launcher gave up ([Errno 28] No space left on device) while at work on job 0" in err and "died" not in err
    )


def test_what_a_full_disk_does_not_take_of_a_death_is_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    import sweep as states

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sweep = states.SweepFolder(tmp_path)
    sweep.write(0, "running", str(tmp_path / "run"))
    monkeypatch.setattr(states, "write_text", full)
    monkeypatch.setattr(states.RunFolder, "write_error", full)
    untold = sweep.lose(0, "its process died")
    assert untold.number == 0 and untold.told == sweep.read(0) and sweep.any_failed()
    assert sweep.read(0)["state"] == "lost"
    assert sweep.read(0)["reason"] == (
        "its process died (error.txt could not be written: [Errno 28] No space left on device); "
        f"cannot write {tmp_path}/job-00000.json: No space left on device"
    )


def test_a_launcher_that_cannot_begin_is_asked_once(rounds):
    asked = []

    def missing(sweep, jobs, first):
        asked.append(first)
        raise ImportError("needs Ray")

    with pytest.raises(ImportError, match="needs Ray"):
        rounds(missing, 3)
    assert asked == [0]


@pytest.mark.parametrize("when", ["first", "again"])
def test_an_interruption_ends_everything(rounds, when):
    asked = []

    def interrupted(sweep, jobs, first):
        asked.append(len(jobs))
        sweep.write(0, "running")
        if when == "again" and len(asked) == 1:
            raise RuntimeError("a worker died")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds(interrupted, 3)
    assert asked == ([3] if when == "first" else [3, 1])


def test_lost_counts_as_failed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    from sweep import SweepFolder

    sweep = SweepFolder(tmp_path)
    sweep.write(0, "running")
    assert not sweep.any_failed() and not sweep.has_told(1)
    sweep.lose(0, "its process died")
    assert sweep.any_failed() and sweep.read(0)["state"] == "lost"


@pytest.mark.parametrize("choice, again", [("joblib", True), ("ray", True), ("slurm", False)])
def test_jobs_that_may_still_be_at_work_are_not_launched_again(monkeypatch, tmp_path, choice, again, capsys):
    """submitit gives up at the first job that died, and the others go on."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra_plugins import kvstitch_sweeper
    from omegaconf import OmegaConf

    from kvstitch.evaluation.records import RunError

    pool = Pool(deadly=(0,))
    hydra = {"sweep": {"dir": str(tmp_path)}, "runtime": {"choices": {"hydra/launcher": choice}}}
    monkeypatch.setattr(kvstitch_sweeper, "write_summary", lambda *_: None)
    sweeper = kvstitch_sweeper.TableSweeper(None)
    sweeper.config = OmegaConf.create({"hydra": hydra})
    sweeper.launcher = SimpleNamespace(launch=lambda jobs, first: pool(sweeper._folder, jobs, first) and [])
    monkeypatch.setattr(BasicSweeper, "sweep", lambda self, asked: self.launcher.launch([["n=0"], ["n=1"]], 0))
    with pytest.raises(RunError, match="1 of 2 jobs have no complete result" if again else "the launcher gave up"):
        sweeper.sweep([])
    assert pool.launched == ([[0, 1], [0], [1]] if again else [[0, 1]])
    assert capsys.readouterr().out.count("lost:") == (1 if again else 2)


@pytest.fixture
def start(tmp_path, tiny_arguments):
    """`start(*arguments)` -> a process with a group of its own at work on a sweep by joblib over presses of `PRESSES`."""
    (tmp_path / "presses_that_die.py").write_text(PRESSES)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONPATH": str(tmp_path)}
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "scorer=kvpress", "task.num_samples=1")

    def run(*arguments):
        return subprocess.Popen(
            [sys.executable, str(SCRIPTS / "run.py"), "-m", *tiny_arguments, *joblib, *arguments],
            cwd=tmp_path, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return run


def states(out):
    """State of every job in the closing table, by its number."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {int(cell[0].split()[0]): cell[1] for cell in cells}


needs_joblib = pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None,
    reason="the joblib launcher is not installed",
)
# Its presses are the jobs that go on.
needs_kvpress = pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")


@pytest.mark.timeout(900)
@needs_joblib
@needs_kvpress
def test_a_dying_job_costs_the_others_nothing(start, tmp_path):
    targets = "presses_that_die.dying,kvpress.KnormPress,presses_that_die.raising,kvpress.LagKVPress"
    for _ in range(2):
        process = start(f"scorer.press._target_={targets}")
        out, err = process.communicate(timeout=420)
        assert process.returncode == 1, err
        found = states(out)
        assert (found[0], found[2]) == ("lost", "failed"), err
        assert {found[1], found[3]} <= {"done", "read from before"}, err
        assert "error: 2 of 4 jobs have no complete result" in err
        assert "0 lost: its process died, also when nothing ran beside it (exit status 3)" in out
        runs = [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
        finished = [run for run in runs if (run / "metrics.json").exists()]
        told = [(run / "error.txt").read_text() for run in runs if (run / "error.txt").exists()]
        assert len(runs) == 4 and len(finished) == 2
        assert sorted("a bug" in text for text in told) == [False, True]
        assert sum(text.startswith("its process died") and "exit status 3" in text for text in told) == 1
        (sweep,) = (tmp_path / "runs" / ".sweeps").iterdir()
        (section,) = json.loads((sweep / "summary.json").read_text())["sections"]
        assert len(section["entries"]) == 2
        # The presses look for the folder of the sweep that is at work.
        sweep.rename(tmp_path / f"sweep-{sweep.name}")


@pytest.mark.timeout(600)
@needs_joblib
@needs_kvpress
@pytest.mark.parametrize("signal_number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_stops_at_once(start, tmp_path, signal_number, status):
    """Ctrl-C reaches the workers, too; SIGTERM the command alone, and workers that it leaves would keep its pipes open."""
    process = start("scorer.press._target_=presses_that_die.hanging,presses_that_die.hanging_too,kvpress.KnormPress")
    try:
        deadline = time.monotonic() + 240
        # Not while a worker still imports: a library may take the signal for an error of its own, and go on.
        while len(list(tmp_path.glob("at-work-*"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        if signal_number == signal.SIGINT:
            os.killpg(process.pid, signal_number)
        else:
            process.send_signal(signal_number)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, err
    assert states(out)[2] == "not run" and "again" not in err
    assert out.count("lost: interrupted while at work") == 2 and "out of memory" not in out


def test_an_error_while_tidying_up_after_an_interruption_is_one(script, tiny_arguments, monkeypatch):
    from kvstitch.evaluation import runner

    def interrupted(*_):
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("'NoneType' object has no attribute 'close'")

    monkeypatch.setattr(runner, "summary", interrupted)
    outcome = script("run", "-m", *tiny_arguments, "task.num_samples=1", "seed=1,2")
    assert outcome.status == 130 and states(outcome.out) == {0: "lost", 1: "not run"}


@needs_kvpress
def test_a_job_that_exits_is_a_failure_and_the_others_go_on(script, tiny_arguments):
    arguments = ("-m", *tiny_arguments, "task.num_samples=1", "scorer=kvpress", "on_error=continue")
    outcome = script("run", *arguments, "scorer.press._target_=sys.exit,kvpress.KnormPress")
    assert outcome.status == 1 and states(outcome.out) == {0: "failed", 1: "done"}
    assert "SystemExit" in outcome.out


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_worker_of_ray_that_dies_is_lost_and_the_others_are_awaited(monkeypatch, tmp_path):
    """Without torch in the workers, which on a busy machine takes them minutes to load."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    import ray
    from hydra_plugins.kvstitch_ray import RayLauncher
    from omegaconf import OmegaConf
    from sweep import SweepFolder

    sweep = SweepFolder(tmp_path)
    launcher = RayLauncher(OmegaConf.create({}), OmegaConf.create({}))
    launcher._config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        die = ray.remote(max_retries=0)(lambda status: os._exit(status))
        wait = ray.remote(lambda seconds: time.sleep(seconds) or seconds)
        fail = ray.remote(lambda: [][0])
        jobs = {die.remote(3): 7, wait.remote(3): 8, wait.remote(0): 9}
        assert launcher._collect(jobs) == [3, 0]
        lost = sweep.read(7)
        assert lost["state"] == "lost" and lost["reason"].startswith("its process died (") and sweep.any_failed()
        assert not sweep.has_told(8)

        # What a full disk does not take of a death goes back to who launched, whose closing table tells it.
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("sweep.write_text", full)
            died, waited = launcher._collect({die.remote(3): 4, wait.remote(0): 5})
        assert waited == 0 and died.return_value.number == 4 and died.return_value.told["state"] == "lost"
        assert "No space left on device" in died.return_value.told["reason"]
        with pytest.raises(IndexError):
            launcher._collect({fail.remote(): 1, wait.remote(1): 2})
    finally:
        ray.shutdown()
