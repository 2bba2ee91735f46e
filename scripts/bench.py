"""Time something on this machine; one table, and one line of JSON at the end.

    python scripts/bench.py bench=retrieval
    python scripts/bench.py bench=event bench.rounds=31
    python scripts/bench.py bench=kernels

A benchmark is a class whose `run()` returns rows: dicts of plain values, those of one `kind` with the same keys.
"""

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

if __name__ == "__main__" and importlib.util.find_spec("hydra") is None:
    # A machine that has what kernels need and nothing else.
    import bench_alone

    sys.exit(bench_alone.main(sys.argv[1:]))

import hydra
from broken_pipe import until_the_reader_leaves
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from hydra_errors import require_keys
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from run import CONFIGS, guarded
from warning_lines import plain_warnings

from kvstitch.evaluation.records import RunError


def bench(config: DictConfig) -> None:
    """Run the benchmark that was chosen, and show what it found."""
    require_keys(OmegaConf.to_container(config, resolve=False), CONFIGS, "bench")
    name = HydraConfig.get().runtime.choices["bench"]
    plain = OmegaConf.to_container(config.bench, resolve=True, throw_on_missing=True)
    with plain_warnings(CONFIGS):
        rows = instantiate(plain, _convert_="all").run()
    console = Console()
    kind_of = lambda row: row.get("kind", name)
    for kind, same in groupby(sorted(rows, key=kind_of), key=kind_of):
        console.print(_table(kind, list(same)))
    print(json.dumps({"bench": name, "machine": _machine(), "rows": rows}))
    red = [row["operator"] for row in rows if not row.get("passed", True)]
    if red:
        raise RunError(f"not timed, because they are wrong on this machine: {', '.join(red)}")


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "kind"]
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table


def _machine() -> dict[str, Any]:
    import torch
    import transformers

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    """Exit status: 0 done, 1 refused or failed, 130 interrupted."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    statuses: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="bench")
    def job(config: DictConfig) -> None:
        statuses.append(guarded(lambda: bench(config), "bench"))

    try:
        return max([guarded(job, "bench"), *statuses])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
