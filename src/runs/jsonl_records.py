"""Append-only JSON lines that several processes write: one line at a time, whole or not at all, none twice."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from src.errors import DataError, RunError
from src.files import reading, sync_directory, writing
from src.runs.appending import append_line

Line = dict[str, Any]


class Records:
    """An open, locked file of lines: nobody else writes until it is closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def rows(self) -> list[Line]:
        """See `rows`."""
        return rows(self.path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk when this returns.

        Raises:
            RunError: the disk refuses. The file holds what it held before.
        """
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with writing(self.path):
            append_line(self._descriptor, line)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Records]:
    """Lock the file `path`, made where it is missing; its folder must exist. A line that a killed writer left half written goes.

    Not twice in one process: it waits.

    Raises:
        RunError: no such folder, no locks on this file system, or the disk refuses.
    """
    descriptor = _locked(path)
    try:
        _mend(path, descriptor)
        yield Records(path, descriptor)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def rows(path: Path) -> list[Line]:
    """Every complete line. A last one without its newline was cut by a crash, or is being written, and is left out.

    Raises:
        DataError: a line that is no JSON object; names the file and the line.
        RunError: the file cannot be read.
    """
    try:
        with reading(path):
            lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, got {line[:60].decode(errors='replace')!r}. Remove this line.")
        found.append(row)
    return found


def _locked(path: Path) -> int:
    while True:
        with writing(path):
            new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            if new:
                sync_directory(path.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # replaced by another, as a rewind does, while we waited
        except OSError as error:
            os.close(descriptor)
            raise RunError(f"{path}: this file system offers no locks (flock: {error.strerror}). Choose another folder.") from error
        os.close(descriptor)


def _mend(path: Path, descriptor: int) -> None:
    """Cut what stands after the last newline."""
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    whole = size
    while whole and os.pread(descriptor, 1, whole - 1) != b"\n":
        whole -= 1
    with writing(path):
        os.ftruncate(descriptor, whole)
