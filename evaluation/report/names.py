"""Short names for configurations that have much in common: what tells them apart, and nothing else."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any


def what_differs(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each configuration its leaves that are not all the same, e.g. `segment_mass=0.05, window_tokens=8`.

    A value that more than half of the configurations share goes without saying there, so that a row with one change in a
    table of ablations is named by its change and the unchanged row by nothing.
    """
    keys = _apart(configs)
    # A configuration that comes twice, with another budget, is one.
    distinct = {tuple(repr(config.get(key)) for key in keys) for config in configs}
    usual = {key: _usual([values[place] for values in distinct]) for place, key in enumerate(keys)}
    names = _key_names(keys)
    values = {key: _value_names([config.get(key) for config in configs]) for key in keys}
    return [
        ", ".join(
            f"{names[key]}={values[key][index]}"
            for key in keys
            # A leaf that is missing is worth a word only where most have it.
            if repr(config.get(key)) != usual[key] and (key in config or usual[key] is not None)
        )
        for index, config in enumerate(configs)
    ]


def told_apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each configuration the values of as few leaves, in their order, as make all of them different."""
    chosen: list[str] = []
    parts = 1
    for key in _apart(configs):
        found = _distinct(configs, [*chosen, key])
        if found > parts:
            chosen.append(key)
            parts = found
    names = _key_names(chosen)
    values = {key: _value_names([config.get(key) for config in configs]) for key in chosen}
    return [
        ", ".join(f"{names[key]}={values[key][index]}" for key in chosen if key in config)
        for index, config in enumerate(configs)
    ]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by their dotted names; a list is a leaf."""
    return dict(_leaves(config, prefix))


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config)
    apart = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    # Classes mostly repeat what other leaves say.
    values = [key for key in apart if not key.endswith("_target_")]
    return values if _distinct(configs, values) == _distinct(configs, apart) else apart


def _distinct(configs: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(repr(config.get(key)) for key in keys) for config in configs})


def _usual(values: Sequence[str]) -> str | None:
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None


def _key_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted name, or all of it where two would be the same."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    return {key: name if last[name := key.rpartition(".")[2]] == 1 else key for key in keys}


def _value_names(values: Sequence[Any]) -> list[str]:
    """As they are written; of paths the last part, where that still tells them apart."""
    texts = list(map(str, values))
    short = [PurePath(text).name or text if "/" in text else text for text in texts]
    return short if len(set(short)) == len(set(texts)) else texts
