"""Records out of local files, each with the place where it stands, so that a bad one can be named."""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstitch.evaluation.options import check_choice

Record = Mapping[str, Any]


class BadRecord(ValueError):
    """A record that cannot become a sample; the message says where it stands and what is wrong."""


# Where the record stands (for messages), a name for it, and the record or what is wrong with it.
Found = tuple[str, str, Record | BadRecord]


def file_records(path: Path, option: str = "task.path") -> Iterator[Found]:
    """Records of a local file: Parquet by the suffix `.parquet`, else one JSON object a line, or one JSON list of objects.

    Blank lines are passed over.

    Args:
        path: the file.
        option: the option that gave the path, for messages.

    Raises:
        FileNotFoundError: no such file.
        IsADirectoryError: a folder.
        ValueError: an empty file, or not a Parquet file although it is called one.
    """
    path = existing(path, option, "a file of JSON Lines, of one JSON list of objects, or of Parquet")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open("rb") as file:
        begin = _first_character(file)
        if not begin:
            raise ValueError(
                f"{option}={path} is empty; it must hold one JSON object a line, or one JSON list of objects"
            )
        is_list = begin == b"["
        file.seek(0)
        yield from _list_items(path, file.read()) if is_list else _lines(file, str(path), path.stem)


def zip_records(archive: Path, member: str) -> Iterator[Found]:
    """Records of a JSON Lines file inside a zip archive.

    Raises:
        ValueError: not an archive, or there is no such member in it.
    """
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as file:
            yield from _lines(file, f"{archive}/{member}", Path(member).stem)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{archive} holds no {member}: {error}") from error


def existing(path: Path, option: str = "task.path", wanted: str = "a file") -> Path:
    """The path, its `~` expanded.

    Args:
        path: of a file.
        option: the option that gave the path, for messages.
        wanted: what the option takes, for messages.

    Raises:
        FileNotFoundError: no such file.
        IsADirectoryError: a folder.
    """
    path = path.expanduser()
    if path.is_dir():
        raise IsADirectoryError(f"{option}={path} is a folder; give {wanted}")
    if not path.is_file():
        raise FileNotFoundError(f"{option}={path}: no such file")
    return path


def settled_name(task: Any, option: str, default: str, choices: Iterable[str]) -> str:
    """An option that says what a file holds: as given, or else what the file of `task.path` is called, or else `default`.

    Raises:
        ValueError: none of `choices`.
    """
    given = getattr(task, option)
    by_file = given is None and task.path is not None
    name = Path(task.path).stem if by_file else default if given is None else given
    check_choice(
        f"task.{option}" + (" (by default what the file of task.path is called)" if by_file else ""), name, choices
    )
    return name


def read_text(path: Path, option: str = "task.path") -> str:
    """A whole UTF-8 file, byte order mark removed.

    Raises:
        FileNotFoundError: no such file.
        IsADirectoryError: a folder.
        ValueError: empty, or not UTF-8.
    """
    path = existing(path, option, "a UTF-8 text file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}={path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{option}={path} is empty")
    return text


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lines(file: Iterable[bytes], place: str, stem: str) -> Iterator[Found]:
    for number, line in enumerate(file, 1):
        if line.strip():
            where = f"{place}:{number}"
            yield where, f"{stem}-{number:06d}", _parse(line, where)


def _list_items(path: Path, content: bytes) -> Iterator[Found]:
    items = _decode(content, str(path), "file")
    if isinstance(items, BadRecord):
        yield str(path), path.stem, items
        return
    for number, item in enumerate(items, 1):
        where = f"{path} item {number}"
        yield where, f"{path.stem}-{number:06d}", _require_object(item, where)


def _parquet_rows(path: Path) -> Iterator[Found]:
    import pyarrow  # with `datasets`; takes a while, and only Parquet files need it
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", f"{path.stem}-{number:06d}", row
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"task.path={path} is no Parquet file: {error}") from error


def _parse(line: bytes, where: str) -> Record | BadRecord:
    return _require_object(_decode(line.rstrip(b"\r\n"), where, "line"), where)


def _decode(content: bytes, where: str, whole: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the {whole}")
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if whole == "file" else ""
        return BadRecord(f"{where}: not JSON: {error.msg} at {line}column {error.colno}")
    except RecursionError:
        return BadRecord(f"{where}: not readable: brackets in more levels than Python's JSON reader takes")


def _require_object(value: Any, where: str) -> Record | BadRecord:
    if isinstance(value, dict | BadRecord):
        return value
    return BadRecord(f"{where}: must be a JSON object, got {short(value)}")


def _first_character(file: Any) -> bytes:
    """The first byte that is not white space nor part of a byte order mark."""
    while byte := file.read(1):
        if byte not in b" \t\r\n\xef\xbb\xbf":
            return byte
    return b""
