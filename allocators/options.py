"""Checks of constructor options; the message names the option, what arrived and what is allowed."""

from collections.abc import Mapping, Sequence

from kvstitch.kernels.common.spelling import did_you_mean


def check_choices(options: object, allowed: Mapping[str, Sequence[str]]) -> None:
    """Raise `ValueError` unless each named field of `options` holds one of its allowed values."""
    for name, choices in allowed.items():
        value = getattr(options, name)
        if value not in choices:
            valid = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {valid}, got {value!r}{did_you_mean(value, choices)}")


def check_counts(options: object, least: Mapping[str, int]) -> None:
    """Raise unless each named field of `options` holds an int that is at least its least value."""
    for name, low in least.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}; the nearest valid value is {low}")


def check_seed(options: object) -> None:
    """Raise unless the `seed` of `options` is an int that every generator takes: 64 bits, not negative."""
    check_counts(options, {"seed": 0})
    if options.seed >= 2**64:
        raise ValueError(f"seed must be less than 2 ** 64, got {options.seed}; the nearest valid value is {2**64 - 1}")


def check_fractions(options: object, names: Sequence[str]) -> None:
    """Raise unless each named field of `options` holds a number in [0, 1]."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 <= value <= 1:
            raise ValueError(
                f"{name} must be in [0, 1], got {value}; the nearest valid value is {min(max(value, 0), 1)}"
            )


def check_switches(options: object, names: Sequence[str]) -> None:
    """Raise unless each named field of `options` is True or False."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
