"""Checks of constructor options; the message names the option, what arrived and what is allowed."""

from collections.abc import Sequence

from kvstitch.kernels.common.spelling import did_you_mean


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value in choices:
        return
    raise ValueError(
        f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{did_you_mean(value, choices)}"
    )


def check_count(name: str, value: object, least: int, odd: bool = False) -> None:
    """Raise unless `value` is an int of at least `least` (and odd, if asked)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; the nearest valid value is {least}")
    if odd and value % 2 == 0:
        raise ValueError(f"{name} must be odd, got {value}; the nearest valid value is {value + 1}")


def check_interval(name: str, value: object, low: float | int, high: float | int, high_allowed: bool = True) -> None:
    """Raise unless `value` is a number from `low` up to `high`, itself included if `high_allowed`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if low <= value < high or (high_allowed and value == high):
        return
    bound = f"[{low:g}, {high:g}{']' if high_allowed else ')'}"
    nearest = f"{low:g}" if value < low else f"{high:g}" if high_allowed else f"just below {high:g}"
    raise ValueError(f"{name} must be in {bound}, got {value}; the nearest valid value is {nearest}")


def check_switch(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
