"""Every data set and generator opens its file with a command, and the command composes."""

import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
COMMANDS = {path.stem: path.read_text().splitlines()[0] for path in sorted((CONFIGS / "task").glob("*.yaml"))}
COMMANDS = {name: line for name, line in COMMANDS.items() if line.startswith("#")}


def test_the_data_sets_and_generators_have_commands():
    assert {"gsm8k", "math500", "aime24", "aime25", "longbench", "longbench_v2", "repobench_p"} <= COMMANDS.keys()
    assert {"ruler", "needle_grid", "key_values", "longeval_lines", "dfs", "babilong"} <= COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_composes_and_is_in_the_table(name):
    arguments = shlex.split(COMMANDS[name].removeprefix("# python scripts/run.py "))
    assert f"task={name}" in arguments
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("run", overrides=arguments)
    assert config.task["_target_"].startswith("kvstitch.evaluation.tasks.")
    assert f"`task={name}" in (ROOT / "docs" / "tasks.md").read_text()
