"""A single run that fails says why in its folder, as a job of a sweep does, and a report repeats it."""

from pathlib import Path


def only_folder(directory="runs"):
    (folder,) = [path for path in Path(directory).iterdir() if not path.name.startswith(".")]
    return folder


def test_a_mistake_after_the_first_sample_is_kept_and_reported(script, tiny_arguments, records):
    whole = records.read_text()
    # Only a tokenizer tells that a prompt is too long.
    first, second, third = whole.splitlines(keepends=True)
    records.write_text(first + second.replace('"prompt": "', '"prompt": "' + "w3 " * 2000) + third)
    outcome = script("run", *tiny_arguments)
    assert outcome.status == 1 and "Traceback" not in outcome.err
    reason = next(line for line in outcome.err.splitlines() if line.startswith("error: ")).removeprefix("error: ")
    kept = (only_folder() / "error.txt").read_text()
    assert "positions" in reason and kept.splitlines()[0] == reason and "Traceback" in kept
    report = script("report", "runs")
    assert f"failed: {reason}" in report.err and "not finished" not in report.err
    records.write_text(whole)
    assert script("run", *tiny_arguments).status == 0 and not (only_folder() / "error.txt").exists()


def test_a_mistake_before_the_first_sample_leaves_nothing(script, tiny_arguments, records):
    records.write_text(records.read_text().replace('"answer"', '"anwser"'))
    assert script("run", *tiny_arguments).status == 1
    assert not [path for path in Path("runs").glob("*") if not path.name.startswith(".")]
