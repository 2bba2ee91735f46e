"""The command line as a stranger meets it: one command, one table, one message when it is wrong."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvstitch.evaluation.plots import can_plot

RUN = Path(__file__).resolve().parents[2] / "scripts" / "run.py"


def folders(directory="runs"):
    """Run folders; what begins with a dot is shared by them."""
    return [path for path in Path(directory).iterdir() if not path.name.startswith(".")]


def only_folder(directory="runs"):
    (folder,) = folders(directory)
    return folder


def test_a_run_writes_its_folder_and_shows_its_table(script, tiny_arguments):
    outcome = script("run", *tiny_arguments)
    assert outcome.status == 0, outcome.err
    folder = only_folder()
    assert folder.name.startswith("jsonl-ams-tova-40-") and f"run folder: {folder}" in outcome.out
    expected = {"config.yaml", "predictions.jsonl", "metrics.json", "run_meta.json", "kept_positions.npz"}
    expected |= {".lock", "first_sample.txt"}
    assert {path.name for path in folder.iterdir()} == expected | ({"kept_positions.png"} if can_plot() else set())
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["budget_bound"] and metrics["num_samples"] == 3
    for name in (
        "accuracy",
        "dense_accuracy",
        "nll",
        "dense_nll",
        "kl",
        "top1_agreement",
        "mean_slots",
        "kv_bytes",
        "kept_bytes",
        "mean_kept_bytes",
        "mean_unfreed_bytes",
        "mean_freed_bytes",
        "events",
    ):
        assert metrics["metrics"][name]["n"] == 3, name
    assert metrics["metrics"]["events"]["mean"] == 4
    assert "press=ams scorer=tova allocator=segment_quota" in outcome.out and "4 sinks and 8 recent" in outcome.out
    assert "[3/3]" in outcome.err or "[3]" in outcome.err
    assert outcome.err.count("loading the model\n") == 1
    assert outcome.err.count("first sample, pressed and dense: records-000001, 100 tokens\n") == 1
    (session,) = json.loads((folder / "run_meta.json").read_text())["sessions"]
    assert session["outcome"] == "finished" and session["seed"] == 42 and "budget=40" in session["command"]


def test_the_same_command_shows_a_finished_run_again(script, tiny_arguments):
    first = script("run", *tiny_arguments)
    before = {path.name: path.read_bytes() for path in only_folder().iterdir()}
    second = script("run", *tiny_arguments)
    assert second.status == 0 and "finished already" in second.err and second.out == first.out
    assert {path.name: path.read_bytes() for path in only_folder().iterdir()} == before


def test_any_change_of_a_value_gets_a_folder_of_its_own(script, tiny_arguments):
    for change in ((), ("seed=1",), ("allocator.segment_mass=0.05",), ("scorer=keydiff",), ("press=dense",)):
        # The dense model has no allocator to set.
        arguments = [a for a in tiny_arguments if "dense" not in str(change) or not a.startswith("allocator.")]
        assert script("run", *arguments, "task.num_samples=1", *change).status == 0
    assert len(folders()) == 5
    assert script("run", *tiny_arguments, "task.num_samples=1", "output_dir=elsewhere").status == 0
    assert only_folder("elsewhere").name in os.listdir("runs")


def test_generate_mode_and_a_budget_that_never_binds(script, tiny_arguments):
    outcome = script("run", *tiny_arguments, "mode=generate", "budget=90", "task.max_new_tokens=4")
    assert outcome.status == 0, outcome.err
    assert "mode=generate" in outcome.out and "THE BUDGET NEVER BOUND" in outcome.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["press=amz"],
            "there is no press=amz; choose one of ams, community, dense, kvpress, topk; did you mean 'ams'?",
        ),
        (["scorer=tovaa"], "did you mean 'tova'?"),
        (["allocator=segment_qota"], "did you mean 'segment_quota'?"),
        (["task=reasonin"], "did you mean 'reasoning'?"),
        (["model=smollm"], "did you mean 'smollm2'?"),
        (["experiment=ams_ablation/no_crdit"], "did you mean 'ams_ablation/no_credit'?"),
        (["bugdet=256"], "there is no option bugdet; valid keys are"),
        (["bugdet=256"], "did you mean 'budget'?"),
        (["allocator.segmnt_mass=0.1"], "there is no option allocator.segmnt_mass; allocator takes batch,"),
        (["allocator=fixed_segments", "allocator.segment_mass=0.1"], "did you mean 'segment_tokens'?"),
        (["press=dense", "scorer.share=group"], "no scorer is chosen here, so it has no options; add scorer=<choice>"),
        (["budget"], "cannot read the option 'budget'; write key=value"),
        (["press=ams,topk"], "add -m to run each of them"),
        (
            ["press=ams", "+press.budgt=1"],
            "there is no option press.budgt; press=ams takes allocator, budget, compress_prompt,",
        ),
        (["press=ams", "+press.budgt=1"], "did you mean 'budget'?"),
        (["+task.lenght=1"], "there is no option task.lenght; task=reasoning takes chat,"),
        (["+sampling.temprature=1"], "did you mean 'temperature'?"),
        (["+bugdet=64"], "there is no option bugdet; valid keys are allocator, budget,"),
        (["++bugdet=64"], "did you mean 'budget'?"),
        (["+method.foo=1"], "no method is chosen here, so it has no options; add method=<choice>"),
        (["press=dense", "+scorer.foo=1"], "no scorer is chosen here, so it has no options; add scorer=<choice>"),
        (["press=AMS"], "did you mean 'ams'?"),
        (["scorer=TOVA"], "did you mean 'tova'?"),
        (["mode=REPLAY"], "did you mean 'replay'?"),
        (["scorer.share=LAYER"], "did you mean 'layer'?"),
        (["allocator.boundary=INCLUDE"], "did you mean 'include'?"),
        (["task.grader=FirstNumber"], "did you mean 'first_number'?"),
        (["press=null"], "there is no press=null; choose one of ams, community, dense, kvpress, topk"),
        (["scorer=null"], "there is no scorer=null; choose one of expected_attention,"),
        (["allocator=5"], "there is no allocator=5; choose one of clusters,"),
        (["task=true"], "there is no task=true; choose one of aime24,"),
        (["model=[hub]"], "there is no model=[\"hub\"]; choose one of hub, smollm2; did you mean 'hub'?"),
        (["method=null"], "there is no method=null; choose one of adakv_expected,"),
        (["method=5"], "there is no method=5; choose one of adakv_expected,"),
        (["experiment=nul"], "there is no experiment=nul; choose one of ams_ablation/..., ams_backbones,"),
        (
            ["~scorer"],
            "~scorer leaves no scorer chosen; name another instead: scorer=<choice>, one of expected_attention,",
        ),
        (
            ["press=ams", "method=tova"],
            "method=tova is press=topk with a scorer and an allocator of its own, and press=ams is",
        ),
        (["-m", "press=ams,null"], "there is no press=null; choose one of ams,"),
        (["press="], "there is no press=; choose one of ams, community"),
        (["press.compress_prompt=flase"], "`press.compress_prompt` must be a bool, got 'flase'"),
        (["press.compress_prompt=3"], "`press.compress_prompt` must be a bool, got 3"),
        (["+press.record_events=abc"], "`record_events` must be a bool, got 'abc'"),
        (["reuse_dense=abc"], "reuse_dense must be true or false, got 'abc'"),
        (["on_error=Stop"], "on_error must be one of continue, stop, got 'Stop'; did you mean 'stop'?"),
        (["output_dir=null"], "output_dir must be text, the name of a folder such as runs"),
        (["output_dir=[1]"], "output_dir must be text, the name of a folder such as runs"),
        (["output_dir=5"], "output_dir must be text, got 5"),
        (
            [f"output_dir={__file__}"],
            "test_run.py is a file where a folder is needed: move it away, or give another output_dir",
        ),
        (["sampling=null"], "sampling is no option but holds some: _target_, do_sample,"),
        (["~sampling"], "sampling was taken away, but it is needed"),
        (["~task.shard"], "task.shard was taken away, but it is needed"),
        (["~budget"], "budget was taken away, but it is needed"),
        (["~output_dir"], "output_dir was taken away, but it is needed: give it a value instead"),
        (["~press"], "name another instead: press=<choice>, one of ams, community, dense, kvpress, topk"),
        (
            ["budget=2"],
            "`budget` must hold the sinks and at least one more token: at least 5 tokens, got 2; raise `budget` or lower `allocator.num_sinks`",
        ),
        (
            ["press=community", "press.num_recent=0"],
            "error: `press.num_recent` must be an integer of at least 1, got 0",
        ),
        (["press=community", "budget=2"], "raise `budget` or lower `press.num_sinks` or `press.num_recent`"),
        (
            ["scorer=triattention", "scorer.shrinkage_tokens=5.0"],
            "error: scorer.shrinkage_tokens=5.0 needs statistics to shrink towards; give scorer.statistics=PATH or leave scorer.shrinkage_tokens=None",
        ),
        (
            ["allocator=pyramid", "allocator.allocator.num_recent=-1"],
            "error: allocator.allocator.num_recent must be at",
        ),
        (["allocator.window_step=2", "allocator.mass_pad=head_max"], "got 'head_max'; set allocator.window_step=1"),
        (["press=community", "scorer=tova"], "error: allocator=community with these options asks for no `scorer`"),
        (
            ["press=community", "allocator=global_topk"],
            "allocator=global_topk evicts and does not retrieve; press=community takes allocator=clusters|community|",
        ),
        (
            ["press=topk", "allocator=pages"],
            "allocator=pages retrieves and evicts nothing; press=topk takes allocator=community_quota|fixed_segments|",
        ),
        (["budget=1.5"], "`budget` as a float is a kept fraction in (0, 1], got 1.5"),
        (["interval=abc"], "`interval` must be a positive number of tokens, got 'abc'"),
        (["press.interval=7"], "interval=512 and press.interval=7 differ"),
        (["allocator.segment_mass=-1"], "segment_mass must be at least"),
        (
            ["scorer.share=lyer"],
            "error: scorer.share must be one of 'layer', 'group', got 'lyer'; did you mean 'layer'?",
        ),
        (["mode=replya"], "mode must be one of replay, generate, got 'replya'; did you mean 'replay'?"),
        (["task=jsonl"], "task.path must be given: add task.path=<value> to the command"),
        (["task=jsonl", "task.path=/nowhere/x.jsonl"], "/nowhere/x.jsonl"),
        (["task.num_samples=0"], "task.num_samples must be at least 1, got 0"),
        (["task.num_samples=abc"], "task.num_samples must be a whole number, got 'abc'"),
        (["task.length=1.5"], "task.length must be a whole number, got 1.5"),
        (["task.chat=flase"], "task.chat must be true or false, got 'flase'; did you mean 'false'?"),
        (["sampling.top_p=null"], "sampling.top_p must be a number, got None"),
        (["model=hub", "model.name=/nowhere"], "model.name='/nowhere': no such folder"),
    ],
)
def test_bad_input_gets_one_message(script, arguments, message):
    outcome = script("run", *arguments)
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.status == 1 and len(errors) == 1 and message in errors[0]
    assert "Traceback" not in outcome.err and outcome.out == ""


def test_a_launcher_without_a_sweep_is_told_to_be_of_no_use(script, tiny_arguments):
    outcome = script("run", *tiny_arguments, "task.num_samples=1", "hydra/launcher=ray")
    assert outcome.status == 0, outcome.err
    assert (
        "warning: hydra/launcher=ray is not used: it launches the jobs of a sweep, add -m" in outcome.err.splitlines()
    )


def test_what_another_script_takes_is_no_key(script):
    outcome = script("run", "bugdet=256")
    keys = outcome.err.split("valid keys are ")[1].split("; did you mean")[0].split(", ")
    assert {"budget", "press", "scorer", "allocator", "task", "model", "method", "experiment"} <= set(keys)
    assert "bench" not in keys


def test_a_bug_shows_its_traceback(script, tiny_arguments, monkeypatch):
    from kvstitch.evaluation import runner

    def broken(records, labels, skipped):
        return records["nothing"]

    monkeypatch.setattr(runner, "summary", broken)
    outcome = script("run", *tiny_arguments)
    assert outcome.status == 1 and "Traceback" in outcome.err and "error: " not in outcome.err
    assert "in broken\n" in outcome.err and "TypeError: list indices must be integers" in outcome.err


def test_a_traceback_can_be_asked_for(script, monkeypatch):
    monkeypatch.setenv("KVSTITCH_TRACEBACK", "1")
    outcome = script("run", "mode=replya")
    assert outcome.status == 1 and "Traceback" in outcome.err and "\nerror: mode must be" in outcome.err


def test_control_c_keeps_finished_samples_and_the_same_command_goes_on(tmp_path, tiny_arguments, script):
    """A process of its own, because it is a real signal: it is sent once the first sample is on the disk."""
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text() * 4)
    command = [sys.executable, str(RUN), *tiny_arguments]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A shell starts background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("runs/*/predictions.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=240)[1]
    assert process.returncode == 130, errors
    assert "interrupted: finished samples are kept in runs/" in errors and "Traceback" not in errors
    folder = only_folder(tmp_path / "runs")
    kept = (folder / "predictions.jsonl").read_bytes()
    assert 1 <= kept.count(b"\n") < 12 and not (folder / "metrics.json").exists()

    os.chdir(tmp_path)
    outcome = script("run", *tiny_arguments)
    assert outcome.status == 0 and "resuming: " in outcome.err
    content = (folder / "predictions.jsonl").read_bytes()
    assert content.startswith(kept) and content.count(b"\n") == 12
    outcomes = [session["outcome"] for session in json.loads((folder / "run_meta.json").read_text())["sessions"]]
    assert outcomes == ["KeyboardInterrupt", "finished"]


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
def test_a_press_of_kvpress_is_a_row_beside_ours(script, tiny_arguments):
    arguments = [text for text in tiny_arguments if not text.startswith("allocator.")]
    outcome = script("run", *arguments, "press=kvpress", "press.name=KnormPress")
    assert outcome.status == 0, outcome.err
    assert only_folder().name.startswith("jsonl-kvpress-KnormPress-40-")
    assert "press=kvpress scorer=KnormPress" in outcome.out and "of the context, once" in outcome.out
    metrics = json.loads((only_folder() / "metrics.json").read_text())["metrics"]
    assert metrics["mean_slots"]["mean"] == 40 and metrics["dense_accuracy"]["n"] == 3


def test_help_names_the_groups_of_a_run(script, capsys):
    with pytest.raises(SystemExit):
        script("run", "--help")
    out = capsys.readouterr().out
    assert (
        "\npress: ams, community, dense, kvpress, topk\n" in out and "\nexperiment/ams_ablation: fixed_segments," in out
    )
    assert "\nbench" not in out and "hydra/" not in out and "\nbudget: 256\n" in out


def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path):
    command = f"{sys.executable} {RUN} --help | head -1; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    # Who is fast enough has written all before the reader left.
    assert found.stdout.splitlines()[1] in ("0", "141") and found.stderr == ""


def test_the_status_of_a_broken_pipe(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(RUN.parent)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import broken_pipe as b; sys.exit(b.until_the_reader_leaves(lambda: print('x' * 9) or 0))"
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", code, RUN.parent], stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert process.returncode == 141 and process.stderr == b""


def test_a_warning_of_ours_is_one_line_with_the_names_of_the_command_line(tmp_path):
    """In a process of its own: our warnings are errors of the tests."""
    arguments = ["budget=20", "model=hub", "model.name=/nowhere"]
    found = subprocess.run([sys.executable, RUN, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    first, warning, _, loading, error = found.stderr.splitlines()
    assert first == "loading PyTorch and transformers"
    assert warning.startswith("warning: the 4 sinks and 32 recent tokens that are always kept fill the 20 slots")
    assert warning.endswith("raise `budget` or lower `allocator.num_recent`")
    assert loading == "loading the model" and error.startswith("error: model.name=")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_model_placed_by_accelerate_gives_the_same(script, tiny_arguments):
    placed = [*(text for text in tiny_arguments if not text.startswith("model.device=")), "model.device_map=auto"]
    if torch.cuda.is_available():
        placed[-1] = "model.device_map=cpu"
    assert script("run", *tiny_arguments).status == 0
    outcome = script("run", *placed, "output_dir=placed")
    assert outcome.status == 0, outcome.err
    answers = [
        [json.loads(line)["answers"] for line in next(Path(name).glob("*/predictions.jsonl")).read_text().splitlines()]
        for name in ("runs", "placed")
    ]
    assert answers[0] == answers[1]
