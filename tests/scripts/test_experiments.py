"""Every experiment can be composed and built, its header says how it is run here and on a GPU, and the paper's figures are data."""

import itertools
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvstitch.allocators import SegmentQuota
from kvstitch.evaluation.paper_reading import read_tables
from kvstitch.evaluation.paper_tables import written
from kvstitch.evaluation.report.names import flat
from kvstitch.presses import EvictionPress, RetrievalPress

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FOLDER = CONFIGS / "experiment"
SWEEPS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# The rows of a table, a file each.
ROWS = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.yaml"))
# Without a figure that is known here, and no row of a paper's table.
NO_PAPER = {
    "ams_gsm8k", "community_babilong", "community_needle", "community_ruler",
    *(f"ams_ablation/public_{name}" for name in ("fixed_segments", "global_topk", "no_mass")),
    *(name for name in ROWS if name.startswith("ams_switches/")),
    *(f"community_ablation/{name}" for name in ("chunks", "fine", "kmeans", "random")),
    *(f"community_quality/{name}" for name in ("multipole", "multipole_like_recommended", "oracle", "oracle_query_head",
                                               "quest_kv_head", "window")),
}  # fmt: skip


def header(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("#")]


def asked(name):
    """The options of a file's own command."""
    words = header(name)[1].split()
    return words[words.index(f"experiment={name}") :]


def jobs(name):
    """The options of each job of a file's own command, at one budget."""
    params = yaml.safe_load((FOLDER / f"{name}.yaml").read_text()).get("hydra", {"sweeper": {"params": {}}})
    each = [
        [f"{key}={value}" for value in str(values).split(",")][: 1 if key == "budget" else None]
        for key, values in params["sweeper"]["params"].items()
    ]
    return [[*asked(name), *job] for job in itertools.product(*each)]


def known_of(config):
    """What a row of a paper is told by."""
    leaves = flat(OmegaConf.to_container(OmegaConf.masked_copy(config, ["allocator"]), resolve=True))
    return leaves | {group: config.hydra.runtime.choices[group] for group in ("press", "scorer", "allocator")}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_built(name):
    assert header(name)[1].startswith(f"python scripts/run.py experiment={name}")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("run", overrides=asked(name))
    task = {key: value for key, value in config.task.items() if key not in ("shard", "num_shards")}
    instantiate(task, _convert_="all")
    assert isinstance(instantiate(config.press, _convert_="all"), EvictionPress | RetrievalPress)


@pytest.mark.parametrize("name", sorted({*SWEEPS, *ROWS} - NO_PAPER))
def test_the_papers_figures_are_data_that_belong_to_a_job_and_change_nothing_of_it(name):
    everything_else = lambda config: OmegaConf.masked_copy(config, [key for key in config if key != "paper"])
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config, without = (compose("run", overrides=[*asked(name), *more]) for more in ([], ["~paper"]))
        assert everything_else(config) == everything_else(without) and without.paper is None
        tables = read_tables(OmegaConf.to_container(config.paper))
        rows = [row for table in tables for row in table.rows]
        configs = (compose("run", overrides=job, return_hydra_config=True) for job in jobs(name))
        assert any(row.fits(known) for known in map(known_of, configs) for row in rows)
    # Each figure stands once: as data.
    cells = [
        cell for figures in (*(row.figures for row in rows), (table.dense for table in tables)) for cell in figures
    ]
    figures = {figure for cell in cells if cell is not None for figure in written(cell).split(" / ")}
    head = " ".join(header(name))
    assert not [figure for figure in figures if re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", head)]


@pytest.mark.parametrize("name", sorted(NO_PAPER))
def test_who_has_no_figures_names_no_paper(name):
    assert "override /paper" not in (FOLDER / f"{name}.yaml").read_text()


def test_every_file_of_figures_is_chosen_by_an_experiment():
    chosen = set(re.findall(r"override /paper: (\w+)", "".join(path.read_text() for path in FOLDER.rglob("*.yaml"))))
    assert chosen == {path.stem for path in (CONFIGS / "paper").glob("*.yaml")}


@pytest.mark.parametrize("name", SWEEPS)
def test_first_and_last_job_of_a_sweep_are_built(name):
    asked = header(name)[1].split()[3:]
    assert header(name)[1].startswith("python scripts/run.py -m ") and asked[0] == f"experiment={name}"
    assert "arXiv" in "".join(header(name))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        params = compose("run", overrides=asked, return_hydra_config=True).hydra.sweeper.params
        overrides = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
        values = [
            list(override.sweep_string_iterator()) if override.is_sweep_override() else [str(override.value())]
            for override in overrides
        ]
        # Small enough for a machine without a GPU.
        assert 2 <= math.prod(map(len, values)) <= 39
        keys = [override.key_or_group for override in overrides]
        assert all((CONFIGS / key / f"{text}.yaml").exists() for key, each in zip(keys, values) for text in each
                   if (CONFIGS / key).is_dir())  # fmt: skip
        built = []
        for place in (0, -1):
            config = compose("run", overrides=[*asked, *(f"{key}={each[place]}" for key, each in zip(keys, values))])
            built.append(instantiate(config.press, _convert_="all"))
            task = {key: value for key, value in config.task.items() if key not in ("shard", "num_shards")}
            instantiate(task, _convert_="all")
    assert all(isinstance(press, EvictionPress | RetrievalPress) for press in built)
    assert built[0] != built[1] or config.task.get("kind") is not None


def larger_settings():
    """Experiment and options, from the documentation's table."""
    text = (
        (CONFIGS.parent / "docs" / "sweeps.md").read_text(encoding="utf-8").partition("### What the small variants")[2]
    )
    name, found = None, []
    for line in text.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and "=" in cells[3]:
            name = cells[0] or name
            found.append((name, cells[3].split()))
    return found


def test_every_small_variant_is_explained():
    assert {name for name, _ in larger_settings()} == {
        "ams_gsm8k", "ams_backbones", "ams_general", "community_longbench", "community_babilong", "community_ruler",
    }  # fmt: skip


@pytest.mark.parametrize("name, options", larger_settings())
def test_the_papers_settings_of_the_documentation_are_built(name, options):
    given = [option for option in header(name)[1].split()[4:] if option.startswith("task.")]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        sweeps = [option.partition(",")[0] for option in options]
        config = compose("run", overrides=[f"experiment={name}", "model=hub", "model.name=m", *given, *sweeps])
    task = {key: value for key, value in config.task.items() if key not in ("shard", "num_shards")}
    instantiate(task, _convert_="all")
    instantiate(config.press, _convert_="all")
    # Not the two samples of the small variant.
    assert config.task.num_samples is None or config.task.num_samples >= 50


def larger_commands():
    """Experiment and options of every command that stands in a head below the one for this machine."""
    found = []
    for name in (*SWEEPS, *ROWS):
        lines = header(name)
        for place, line in enumerate(lines[2:], start=2):
            if not line.startswith("python scripts/run.py"):
                continue
            more = itertools.takewhile(lambda text: text.startswith("    "), lines[place + 1 :])
            # A list that goes on in the next line has no blank in it.
            words = shlex.split(" ".join([line, *map(str.strip, more)]).replace(", ", ","))
            # Of a table's head its last command may be for all rows.
            given = words[words.index(f"experiment={name}") + 1 :] if f"experiment={name}" in words else words[4:]
            options = [word.partition(",")[0] for word in given if word != "…"]
            found.append((name, [option.replace("…", "x") for option in options]))
    return found


@pytest.mark.parametrize(
    "name", [name for name in (*SWEEPS, *ROWS) if name.startswith("ams") and "switches" not in name]
)
def test_every_table_of_ams_has_a_command_for_a_gpu(name):
    assert any(found == name and "model=hub" in options for found, options in larger_commands())


@pytest.mark.parametrize("name, options", larger_commands())
def test_the_larger_commands_of_the_heads_are_built(name, options):
    options = [*options, "model.name=m"] if "model=hub" in options else options
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("run", overrides=[f"experiment={name}", *options])
    task = {key: value for key, value in config.task.items() if key not in ("shard", "num_shards")}
    instantiate(task, _convert_="all")


AMS_METHODS = ["tova", "expected", "triattention", "keydiff", "rkv"]


@pytest.mark.parametrize("scorer", AMS_METHODS)
def test_each_ams_method_stands_there_as_ours_and_as_the_papers(scorer):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        ours, paper = (
            instantiate(compose("run", overrides=[f"method=ams_{scorer}{end}"]).press, _convert_="all")
            for end in ("", "_paper")
        )
    assert ours.allocator == SegmentQuota.recommended() and paper.allocator == SegmentQuota.paper()
    assert ours.scorer == paper.scorer


def test_adakv_as_the_paper_has_it_hides_and_ours_frees():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        ours, paper = (
            instantiate(compose("run", overrides=[f"method=adakv_expected{end}"]).press, _convert_="all")
            for end in ("", "_mask")
        )
    assert (ours.allocator.mode, paper.allocator.mode) == ("ragged", "mask") and ours.scorer == paper.scorer


@pytest.mark.parametrize("name, options", [(name, options) for name, options in larger_commands() if name[:3] == "ams"])
def test_the_larger_commands_of_ams_are_those_of_its_public_evaluator(name, options):
    """EIT-NLP/AdaptiveMassSegment at 7eb32cd, evaluation/evaluate.py: greedy, 512 tokens between events."""
    options = [*options, "model.name=m"] if "model=hub" in options else options
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("run", overrides=[f"experiment={name}", *options])
    assert not config.sampling.do_sample and config.interval == 512
    most = {"Math500": 4096, "GSM8K": 1024}.get(config.task["_target_"].rpartition(".")[2])
    assert most is None or config.task.max_new_tokens == most


@pytest.mark.parametrize("name", SWEEPS)
def test_the_head_says_how_long_it_takes_and_whose_settings_they_are(name):
    head = " ".join(header(name))
    assert re.search(r"about \d+ minutes", head)
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    methods = re.search(r"^      method: (.+)$", text, re.MULTILINE)
    if methods and "ams_" in methods.group(1):
        assert "recommends" in head and "the paper's values" in head


def test_the_memory_experiment_has_every_budget_and_both_kinds_of_adakv():
    text = (CONFIGS / "experiment" / "ams_memory.yaml").read_text()
    assert "budget: 128,512,1024\n" in text and "adakv_expected_mask,adakv_expected," in text
