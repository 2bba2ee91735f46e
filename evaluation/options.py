"""Checks of what users write; the message names the option, what arrived and what is allowed.

Needs no torch: a typo is answered before that is loaded.
"""

import dataclasses
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from kvstitch.kernels.common.spelling import did_you_mean

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_SWITCHES = ("true", "false")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    choices = list(choices)
    # A list of the command line has no hash, so that a dict could not be asked for it.
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{did_you_mean(value, choices)}")


def check_types(options: Any, group: str) -> None:
    """Raise unless each field of a dataclass that is annotated as plain holds what its annotation says.

    Args:
        options: an instance; of its fields those count that take a truth value, a number, text, or one of them or None.
        group: what stands before the name of a field on the command line, e.g. "task".

    Raises:
        TypeError: a field holds something else.
    """
    for field in dataclasses.fields(options):
        kind, optional = _kind(field)
        value = getattr(options, field.name)
        if kind in _KINDS:
            check_type(f"{group}.{field.name}", value, kind, optional)


def check_least(options: Any, group: str, least: dict[str, int]) -> None:
    """Raise `ValueError` if a named field holds a number below its least value; None is passed over."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            allowed = " or null" if _kind(fields[name])[1] else ""
            raise ValueError(f"{group}.{name} must be at least {low}{allowed}, got {value}")


def check_counts(name: str, values: object, least: int = 1, may_be_empty: bool = False) -> None:
    """Raise unless `values` is a list of whole numbers of at least `least`.

    Raises:
        TypeError: no list, or something else in it.
        ValueError: a number below, or nothing in the list although something is needed.
    """
    wanted = f"{name} must be a list of whole numbers of at least {least}"
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{wanted}, got {values!r}; write {name}=[{values}] for one")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{wanted}, got {value!r} in it")
        if value < least:
            raise ValueError(f"{wanted}, got {value} in it")
    if not values and not may_be_empty:
        raise ValueError(f"{wanted}, got an empty one")


def check_type(name: str, value: object, kind: type, optional: bool = False) -> None:
    """Raise `TypeError` unless `value` is a bool, int, float or str, as `kind` says; a whole number serves as a float."""
    if optional and value is None:
        return
    accepted = (int, float) if kind is float else kind
    if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
        return
    hint = ""
    if kind is bool and isinstance(value, str):
        hint = did_you_mean(value, _SWITCHES)
    elif kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        hint = f"; as text it needs quotes that the shell leaves alone: {name}=\"'{value}'\""
    raise TypeError(f"{name} must be {_KINDS[kind]}{' or null' if optional else ''}, got {value!r}{hint}")


def _kind(field: dataclasses.Field) -> tuple[Any, bool]:
    """What a field is annotated with, and whether None is allowed beside it."""
    kinds = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
    wanted = [kind for kind in kinds if kind is not NoneType]
    return (wanted[0] if len(wanted) == 1 else None), NoneType in kinds
