"""Budgets as they stand in a configuration: their words and their place on an axis."""

import re
from typing import Any

# As `Budget` reads them, in whatever case.
_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def budget_words(budget: Any) -> tuple[str, float]:
    """How a budget is written, and its number: `256 tokens`, 256.

    Raises:
        ValueError: it is none.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]+)\s*", budget)
        if found and (unit := _UNITS.get(found[2].upper())):
            return budget, float(found[1]) * unit
    elif isinstance(budget, int | float) and not isinstance(budget, bool):
        return (f"{budget} tokens" if isinstance(budget, int) else f"{100 * budget:g} %"), float(budget)
    raise ValueError(f"budget must be a number of tokens, a share, or bytes such as 64MiB, got {budget!r}")
