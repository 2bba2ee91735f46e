"""`bench=kernels` where Hydra is not installed, and kvstitch perhaps neither: it needs torch, triton, transformers,
jaxtyping and scipy."""

import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OPTIONS = {"bench.device": "--device", "bench.limit_sec": "--limit-sec"}


def main(arguments: Sequence[str]) -> int:
    """Exit status of the benchmark, or 1 with one message if something else was asked for.

    Args:
        arguments: the command line in Hydra's form, e.g. `bench=kernels bench.device=cpu`.
    """
    options, rest = [], []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in _OPTIONS:
            options += [_OPTIONS[key], value]
        elif argument != "bench=kernels":
            rest.append(argument)
    if rest or "bench=kernels" not in arguments:
        print(
            "error: hydra is not installed, without which only bench=kernels runs, with "
            f"{' and '.join(_OPTIONS)}: got {' '.join(rest or arguments) or 'nothing'}; pip install -e . installs it",
            file=sys.stderr,
        )
        return 1
    if importlib.util.find_spec("kvstitch") is None:
        # What an installation does: the folders of this checkout are the parts of the package.
        package = types.ModuleType("kvstitch")
        package.__path__ = [str(ROOT)]
        sys.modules["kvstitch"] = package
    from kvstitch.evaluation.benchmarks import kernels

    return kernels.main(options)
