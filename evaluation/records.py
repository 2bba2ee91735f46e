"""The run folder: one a configuration, predictions appended a sample at a time, nothing overwritten, safe against kill -9."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import yaml
from filelock import FileLock, Timeout

PREDICTIONS = "predictions.jsonl"
METRICS = "metrics.json"
CONFIG = "config.yaml"
RUN_META = "run_meta.json"
PAPER = "paper.json"
ERROR = "error.txt"
KEPT_POSITIONS = "kept_positions.npz"
REGIONS = "regions.npz"


class RunError(Exception):
    """A run cannot start or go on; the message is for the user and says what to do."""


def config_hash(config: Mapping[str, Any]) -> str:
    """12 hex digits that name a resolved configuration: plain dicts, lists and scalars; the order of keys is nothing."""
    try:
        canonical = json.dumps(config, sort_keys=True, allow_nan=False)
    except ValueError:
        raise RunError("the configuration holds nan or inf where a number is wanted; give a finite one") from None
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def folder_name(labels: list[str], config: Mapping[str, Any]) -> str:
    """Readable first, unique last: `reasoning-ams-tova-256-0123456789ab`."""
    readable = [re.sub(r"[^A-Za-z0-9._]+", "_", label) for label in labels if label]
    return "-".join([*readable, config_hash(config)])


class FolderInUse(RunError):
    """Another process writes the folder, so nobody else does, not even to say so."""


class RunFolder:
    """Everything one run writes. Only the holder of the lock writes.

    Args:
        path: the folder; made when it is first opened.
        config: name of the file that says whose it is; another one than a run's where no report should look for a run.
    """

    def __init__(self, path: Path, config: str = CONFIG):
        self.path = path
        self._config = config
        self._is_held = False

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def opened(self, config_yaml: str) -> Iterator["RunFolder"]:
        """Hold the folder for this process and put the resolved configuration in place.

        A folder that was made here and in which no sample was finished is taken away again if the block fails: nothing
        would be resumed from it.

        Raises:
            FolderInUse: another process holds it.
            RunError: what stands there belongs to another configuration.
        """
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderInUse(
                f"another process is at work on {self.path}; wait for it, or change the command (seed, budget, "
                "output_dir) so that the run gets a folder of its own"
            ) from None
        try:
            self._claim(config_yaml)
            self._is_held = True
            yield self
        except BaseException:
            # While the lock is held: whoever waits for it finds no folder and says so.
            if is_new and not self.predictions.exists():
                shutil.rmtree(self.path)
            raise
        finally:
            self._is_held = False
            lock.release()

    def _claim(self, config_yaml: str) -> None:
        if not (self.path / self._config).exists():
            write_text(self.path / self._config, config_yaml)
        self.require_config(config_yaml)

    def require_config(self, config_yaml: str) -> None:
        """Raises:
        RunError: what stands here belongs to another configuration.
        """
        config = self.path / self._config
        if config.exists() and config.read_text(encoding="utf-8") != config_yaml:
            raise RunError(f"{config} is not the configuration of this run; move {self.path} away to start afresh")

    @property
    def predictions(self) -> Path:
        return self.path / PREDICTIONS

    def read_records(self) -> list[dict[str, Any]]:
        """The finished samples, without a last line that was torn by a killed process.

        Inside `opened` the file is mended, too: the torn line is cut off. Whoever only looks on writes nothing, because
        another process may just be at that line.

        Raises:
            RunError: a line that no interrupted write explains, or a sample twice; both named by line.
        """
        if not self.predictions.exists():
            return []
        content = self.predictions.read_bytes()
        lines = content.split(b"\n")
        tail = lines.pop()
        if tail and self._is_held:
            self._mend(content, tail)
        if tail and _parse(tail) is not None:
            lines.append(tail)
        records, seen = [], set()
        for number, line in enumerate(lines, start=1):
            record = _parse(line)
            if record is None:
                raise RunError(f"{self.predictions}, line {number}, is not a record of a sample; move {self.path} away")
            if record["id"] in seen:
                raise RunError(
                    f"{self.predictions}, line {number}, repeats sample {record['id']!r}; move {self.path} away"
                )
            seen.add(record["id"])
            records.append(record)
        return records

    def _mend(self, content: bytes, tail: bytes) -> None:
        """A line without its end: whole but for the newline, or cut short and then not worth keeping."""
        with self.predictions.open("r+b") as file:
            if _parse(tail) is not None:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            else:
                file.truncate(len(content) - len(tail))
            file.flush()
            os.fsync(file.fileno())

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one finished sample; on return it is on the disk.

        Raises:
            RunError: the disk is full or read-only; what was written before is kept, `read_records` mends the rest.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self.predictions.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write {self.predictions}: {error.strerror}; the samples finished before are kept, and the same "
                "command goes on from there"
            ) from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Content of a JSON file of the folder, None if it is not there.

        Raises:
            RunError: it is not such a file any more.
        """
        path = self.path / name
        if not path.exists():
            return None
        try:
            return _mapping(path, json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise _damaged(path, error) from error

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration.

        Raises:
            RunError: there is none, or it cannot be read any more.
        """
        path = self.path / CONFIG
        if not path.is_file():
            raise RunError(f"{self.path} is no run folder: it has no {CONFIG}")
        try:
            return _mapping(path, yaml.safe_load(path.read_text(encoding="utf-8")))
        except (yaml.YAMLError, ValueError) as error:
            raise _damaged(path, error) from error

    def write_error(self, text: str) -> None:
        """Say in the folder, which is made if need be, why the run did not finish."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / ERROR, text)

    def clear_error(self) -> None:
        """The run finished after all."""
        (self.path / ERROR).unlink(missing_ok=True)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a JSON file of the folder; it is whole at every moment."""
        write_text(self.path / name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        RunError: the disk is full or read-only; what stood there is kept.
    """
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into, which takes its place when the block is left, on the disk and whole, or not at all.

    Raises:
        RunError: the disk is full or read-only; what stood there is kept, and nothing else is left.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _mapping(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise _damaged(path, f"a mapping is wanted, not {content!r:.40}")
    return content


def _damaged(path: Path, reason: Exception | str) -> RunError:
    # Of several lines of explanation the first says what is wrong.
    return RunError(f"{path} is damaged ({str(reason).splitlines()[0]}); move {path.parent} away")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None


def _refuse_constant(name: str) -> NoReturn:
    """NaN and infinities, which `append` never writes."""
    raise ValueError(f"{name} is no JSON")
