"""Papers' tables read from configurations, with every mistake named.

Needs no torch: a mistake is answered before that is loaded.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import kvstitch.configs
from kvstitch.evaluation.metric_titles import KNOWN_METRICS
from kvstitch.evaluation.options import check_choice, check_type
from kvstitch.evaluation.paper_tables import Figure, PaperRow, PaperTable
from kvstitch.kernels.common.spelling import did_you_mean

Models = str | tuple[str, ...]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables of `configs/paper/`, in the order of its files."""
    folder = Path(kvstitch.configs.__file__).parent / "paper"
    return tuple(
        table
        for path in sorted(folder.glob("*.yaml"))
        for table in read_tables(yaml.safe_load(path.read_text(encoding="utf-8")), f"paper/{path.name}")
    )


def read_tables(plain: Any, option: str = "paper") -> tuple[PaperTable, ...]:
    """The tables of one paper.

    Args:
        plain: None, for none, or a mapping of `source` and `tables`, each with the fields of `PaperTable`; `rows` by their
            names, with one of `figures` for each budget, or, without budgets, one alone.
        option: its name, for messages.

    Raises:
        TypeError: something is of another kind than it must be.
        ValueError: a key that nobody reads or that is missing, too many or too few figures, a metric that is none of ours,
            or two tables of one name.
    """
    if plain is None:
        return ()
    _check_keys(option, plain, ("source", "tables"))
    check_type(f"{option}.source", plain["source"], str)
    listed = _several(f"{option}.tables", plain["tables"])
    tables = tuple(_table(f"{option}.tables[{index}]", plain["source"], table) for index, table in enumerate(listed))
    _check_distinct(f"{option}.tables", [table.table for table in tables])
    return tables


def _table(option: str, source: str, plain: Any) -> PaperTable:
    known = [field for field in fields(PaperTable) if field.name != "source"]
    needed = [field.name for field in known if field.default is MISSING]
    _check_keys(option, plain, needed, [field.name for field in known if field.default is not MISSING])
    for name in ("table", "task", "metric"):
        check_type(f"{option}.{name}", plain[name], str)
    check_type(f"{option}.unit", plain.get("unit"), str, optional=True)
    ours = _several(f"{option}.our_metrics", plain["our_metrics"], str)
    for metric in ours:
        check_choice(f"{option}.our_metrics", metric, KNOWN_METRICS)
    tasks, budgets = plain.get("our_tasks"), plain.get("budgets")
    model, budgets = _models(f"{option}.model", plain["model"]), _budgets(f"{option}.budgets", budgets)
    if not isinstance(plain["rows"], Mapping) or not plain["rows"]:
        raise TypeError(f"{option}.rows must be a mapping of rows by their names, got {plain['rows']!r}")
    return PaperTable(
        **{name: plain[name] for name in ("table", "task", "metric")},
        source=source,
        unit=plain.get("unit"),
        model=model,
        our_metrics=ours,
        our_tasks=None if tasks is None else _several(f"{option}.our_tasks", tasks, str),
        budgets=budgets,
        dense=_figure(f"{option}.dense", plain.get("dense"), model),
        rows=tuple(_row(f"{option}.rows.{name}", name, row, budgets, model) for name, row in plain["rows"].items()),
    )


def _models(option: str, plain: Any) -> Models:
    if isinstance(plain, list | tuple):
        return _several(option, plain, str)
    check_type(option, plain, str)
    return plain


def _budgets(option: str, plain: Any) -> tuple[int, ...] | None:
    if plain is None:
        return None
    budgets = _several(option, plain, int)
    _check_distinct(option, budgets)
    return budgets


def _row(option: str, name: Any, plain: Any, budgets: tuple[int, ...] | None, model: Models) -> PaperRow:
    check_type(f"the name of {option}", name, str)
    _check_keys(option, plain, ("match", "figures"))
    match, figures = plain["match"], plain["figures"]
    if not isinstance(match, Mapping) or not match:
        raise TypeError(f"{option}.match must be a mapping of names and leaves, such as press: ams, got {match!r}")
    if budgets is None:
        figures = [figures]
    elif not isinstance(figures, list | tuple) or len(figures) != len(budgets):
        raise ValueError(f"{option}.figures must be a list of {len(budgets)}, one a budget, got {figures!r}")
    wanted = {key: tuple(value) if isinstance(value, list) else value for key, value in match.items()}
    return PaperRow(name, wanted, tuple(_figure(f"{option}.figures", figure, model) for figure in figures))


def _figure(option: str, figure: Any, model: Models) -> Figure | None:
    if figure is None or isinstance(figure, str):
        return figure
    if isinstance(model, str):
        if not _is_number(figure):
            raise TypeError(f"{option} must hold finite numbers, texts or null for the one model, got {figure!r}")
        return figure
    if not isinstance(figure, list | tuple) or len(figure) != len(model) or not all(map(_is_number, figure)):
        raise TypeError(
            f"{option} must hold lists of {len(model)} finite numbers, one a model, texts or null, got {figure!r}"
        )
    return tuple(figure)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _several(option: str, value: Any, kind: type | None = None) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise TypeError(f"{option} must be a list that is not empty, got {value!r}")
    for index, item in enumerate(value if kind else ()):
        check_type(f"{option}[{index}]", item, kind)
    return tuple(value)


def _check_distinct(option: str, values: Iterable[Any]) -> None:
    values = list(values)
    if len(set(values)) < len(values):
        raise ValueError(f"{option} must differ from each other, got {', '.join(map(str, values))}")


def _check_keys(option: str, plain: Any, needed: Iterable[str], others: Iterable[str] = ()) -> None:
    needed, valid = list(needed), [*needed, *others]
    takes = f"{option} takes {', '.join(valid)}"
    if not isinstance(plain, Mapping):
        raise TypeError(f"{option} must be a mapping, got {plain!r}; {takes}")
    for key in plain:
        if key not in valid:
            raise ValueError(f"there is no option {option}.{key}; {takes}{did_you_mean(key, valid)}")
    missing = [key for key in needed if key not in plain]
    if missing:
        raise ValueError(f"{option} lacks {', '.join(missing)}; {takes}")
