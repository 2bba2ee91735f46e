"""Every command of scripts/run.py that README, documentation and the heads of the configuration show can be composed.

The heads of single tasks and experiments have their own tests: tests/evaluation/tasks/test_headers.py, test_configs.py and
test_experiments.py.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
COMMAND = re.compile(r"python scripts/run\.py(?= )([^`\n]*)")
# The scorer that the README adds, within the checkout and outside (test_part_names.py runs such a one), and a line whose end stands in the table below it.
UNFINISHED = {
    "press=topk scorer=value_norm",
    "--config-dir options press=topk scorer=value_norm",
    "-m experiment=",
}


def shown_in_markdown(path):
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    found = [match.strip() for match in COMMAND.findall(text)]
    if path.name == "tasks.md":
        # Its tables show what follows the name of the script.
        found += re.findall(r"\| `(task=[^`]+)` \|$", text, re.MULTILINE)
    return found


def shown_in_head(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    # What stands far to the right is a remark.
    return [re.split(r" {2,}", match.strip())[0] for line in lines for match in COMMAND.findall(line)]


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADS = [
    path for path in sorted(CONFIGS.rglob("*.yaml"))
    if path.parent.name not in ("task", "experiment")
]  # fmt: skip
SHOWN = list(dict.fromkeys(
    (str(path.relative_to(ROOT)), command)
    for paths, shown in ((DOCUMENTS, shown_in_markdown), (HEADS, shown_in_head)) for path in paths for command in shown(path)
    if command not in UNFINISHED and not re.match(r"experiment=\w+/\w+( task\.path=book\.txt)?$", command)
))  # fmt: skip


def test_the_commands_are_found():
    found = [name for name, _ in SHOWN]
    assert found.count("README.md") >= 7 and found.count("docs/sweeps.md") >= 5 and found.count("docs/tasks.md") >= 16
    assert found.count("docs/communitykv.md") >= 3 and found.count("configs/hydra/help/kvstitch.yaml") == 4
    assert {"configs/run.yaml", "configs/calibrate.yaml", "configs/debug/smoke.yaml"} <= set(found)
    assert sum("glob(" in command for _, command in SHOWN) >= 5


def prepare(words):
    """As scripts/run.py does."""
    spec = importlib.util.spec_from_file_location("hydra_arguments", ROOT / "scripts" / "hydra_arguments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prepare(words, CONFIGS)


@pytest.fixture(scope="module")
def configs():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


@pytest.mark.parametrize(("place", "command"), SHOWN)
def test_a_shown_command_is_composed(place, command, configs):
    words = prepare(shlex.split(command, comments=True))
    flags = {word for word in words if word.startswith("-")}
    words = [word for word in words if word not in flags]
    if "-m" in flags:
        # What Hydra composes before the jobs.
        loader = GlobalHydra.instance().config_loader()
        loader.load_configuration("run", words, run_mode=RunMode.MULTIRUN)
    for job in {tuple(chosen(word, end) for word in words) for end in (0, -1)}:
        config = compose("run", overrides=list(job))
        # Nothing is left for the reader to find out.
        assert not OmegaConf.missing_keys(config)
        task = {key: value for key, value in config.task.items() if key not in ("shard", "num_shards")}
        instantiate(task, _convert_="all")


def chosen(word, end):
    """An override with the first or last value of its sweep."""
    (override,) = OverridesParser.create().parse_overrides([word])
    if not override.is_sweep_override():
        return word
    values = list(override.sweep_string_iterator())
    return f"{override.get_key_element()}={values[end]}"
