"""Fields of a record: found, checked, and put into templates; every error names the record."""

import json
import re
from string import Formatter
from typing import Any

from kvstitch.evaluation.tasks.sources import BadRecord, Record, short
from kvstitch.kernels.common.spelling import did_you_mean


def field(record: Record, name: str, where: str) -> Any:
    """The value of a field.

    Raises:
        BadRecord: there is none; the nearest name is proposed.
    """
    if name not in record:
        raise BadRecord(
            f"{where}: no field {name!r}, it has {', '.join(map(repr, record))}{did_you_mean(name, record)}"
        )
    return record[name]


def text_field(record: Record, name: str, where: str) -> str:
    """The text in a field.

    Raises:
        BadRecord: no such field, or it holds something else.
    """
    return typed_field(record, name, str, "text", where)


def typed_field(record: Record, name: str, kind: type, description: str, where: str) -> Any:
    """The value of a field that must be of one kind.

    Raises:
        BadRecord: no such field, or of another kind.
    """
    value = field(record, name, where)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRecord(f"{where}: field {name!r} must hold {description}, got {short(value)}")
    return value


def gold_field(record: Record, name: str, pattern: str | None, where: str) -> tuple[str, ...]:
    """What is accepted as an answer.

    Args:
        pattern: regular expression whose first group is the answer inside the field; `None`: the whole field.

    Raises:
        BadRecord: neither text nor a number nor a filled list of them, or the pattern does not match.
    """
    value = field(record, name, where)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str | int | float) for one in values):
        raise BadRecord(f"{where}: field {name!r} must hold text, a number or a list of them, got {short(value)}")
    gold = []
    for text in map(str, values):
        if pattern is not None:
            found = re.search(pattern, text)
            if found is None:
                raise BadRecord(f"{where}: {name!r} does not match {pattern!r}: {short(text)}")
            text = found.group(1).strip()
        gold.append(text)
    return tuple(gold)


def template_fields(template: str, option: str) -> list[str]:
    """Names of the fields in a template.

    Raises:
        ValueError: a brace is left open, or what stands in braces is no name.
    """
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"task.{option}={template!r}: {error}; write {{{{ and }}}} for braces") from error
    for name in fields:
        # "{a.b}" and "{a[0]}" would reach into Python objects.
        if not name or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"task.{option}={template!r}: {{{name}}} is not the name of a field")
    return fields


def fill(template: str, record: Record, where: str) -> str:
    """The template with the record's fields; what is not text is written as JSON.

    Raises:
        BadRecord: a field is missing.
    """
    values = {}
    for name in template_fields(template, "template"):
        value = field(record, name, where)
        values[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return template.format_map(values)
