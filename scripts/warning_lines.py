"""Warnings of the library as one plain line each, without the place in the code that Python shows."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from option_names import as_written, group_of_module


@contextmanager
def plain_warnings(configs: Path) -> Iterator[None]:
    """Within the block what kvstitch warns of is `warning: …` on standard error; other libraries' warnings stay as they are.

    Args:
        configs: folder of the configuration, for the names of options.
    """
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        # The file that Python was given is that of some caller further up; who warns stands above `warnings` itself.
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        if not module.startswith("kvstitch."):
            usual(message, category, filename, lineno, *rest)
            return
        group = group_of_module(module)
        text = str(message) if group is None else as_written(str(message), group, configs)
        print(f"warning: {text}", file=sys.stderr, flush=True)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual
