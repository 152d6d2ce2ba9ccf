"""JSON Lines files: atomic appends, truncation after a step, and reads from the start, the end, or a position."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from src.errors import DataError, RunError
from src.files import reading, sync_directory, writing
from src.support.parsing import parse_json

TAIL_BYTES = 4096
_WINDOW = 2**16
_EMPTY = hashlib.sha256(b"").hexdigest()
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT
Line = dict[str, Any]


class Records:
    """A file of lines, open and locked against other writers."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def rows(self) -> list[Line]:
        """See `rows`."""
        return rows(self.path)

    def append(self, row: Mapping[str, Any], ensure_ascii: bool = True) -> None:
        """Append a line and sync it to disk.

        Raises:
            RunError: the disk refuses. The file is unchanged.
        """
        with writing(self.path):
            _append(self._descriptor, json.dumps(row, allow_nan=False, ensure_ascii=ensure_ascii).encode() + b"\n")


@contextlib.contextmanager
def open_locked(path: Path, mend: bool = True) -> Iterator[Records]:
    """Lock the file `path`, created if missing; its folder must exist. mend: delete a partial line of a killed writer.

    Not reentrant: a second call in the same process waits.

    Raises:
        RunError: no such folder, no locks on this file system, or the disk refuses.
    """
    descriptor = _lock_file(path)
    try:
        if mend:
            size, _ = next(lines_from_end(path), (0, b""))
            _truncate(path, size)
        yield Records(path, descriptor)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def append(path: Path, rows: Iterable[Mapping[str, Any]], durable: bool = True, allow_nan: bool = False) -> None:
    """Append lines to a file that only this process writes, created if missing. durable: sync it to disk.

    Raises:
        RunError: the disk refuses. The file is unchanged.
    """
    text = "".join(json.dumps(row, allow_nan=allow_nan) + "\n" for row in rows).encode()
    with writing(path):
        new = not path.exists()
        descriptor = os.open(path, _FLAGS, 0o666)
        try:
            _append(descriptor, text, durable)
        finally:
            os.close(descriptor)
        if new and durable:
            sync_directory(path.parent)


def truncate_after(path: Path, step: int, kind: str) -> None:
    """Drop the lines after `step`, and a partial line of a killed writer. Reads from the end, as the file can be long.

    Each line has a "step", in increasing order. kind: the expected content, for the message.

    Raises:
        DataError: a line at the end is malformed; quotes it.
        RunError: the disk refuses.
    """
    size = 0
    for end, line in lines_from_end(path):
        try:
            of_line = int(parse_json(line, path, DataError)["step"])
        except (DataError, ValueError, TypeError, KeyError):
            raise DataError(f"{path}: not {kind}: {line[:60].decode(errors='replace')!r}. Remove this line.") from None
        if of_line <= step:
            size = end
            break
    _truncate(path, size)


def rows(path: Path) -> list[Line]:
    """All complete lines. A last line without newline was truncated by a crash, or is being written, and is left out.

    Raises:
        DataError: a line is not a JSON object; names the file and the line.
        RunError: the file cannot be read.
    """
    result = []
    for number, line in enumerate(complete_lines(path), start=1):
        row = parse_object(line)
        if row is None:
            raise DataError(
                f"{path}:{number}: expected a JSON object, "
                f"got {line[:60].decode(errors='replace')!r}. Remove this line."
            )
        result.append(row)
    return result


def parse_object(line: bytes) -> Line | None:
    """The JSON object in `line`; None for any other content."""
    try:
        row = parse_json(line, "", DataError)
    except DataError:
        return None
    return row if isinstance(row, dict) else None


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file that end with a newline, without the newlines. Empty if there is no file.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        with reading(path):
            return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """(position after its newline, line without newline) of each complete line, the last first.
    Empty if there is no file.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        with reading(path), open(path, "rb") as file:
            start, buffer = file.seek(0, os.SEEK_END), b""
            while start:
                count = min(_WINDOW, start)
                start -= count
                file.seek(start)
                buffer = file.read(count) + buffer
                first = buffer.find(b"\n") + 1 if start else 0  # the line before it can start earlier
                if start and not first:
                    continue
                *lines, partial = buffer[first:].split(b"\n")
                end = start + len(buffer) - len(partial)
                for line in reversed(lines):
                    yield end, line
                    end -= len(line) + 1
                buffer = buffer[:first]
    except FileNotFoundError:
        return


class AppendedLines(NamedTuple):
    """The result of `read_appended`."""

    start: int
    """Number of bytes that were read before."""
    lines: bytes
    """The complete lines after `start`."""
    tail: str
    """sha256 of the last `TAIL_BYTES` bytes up to the end of `lines`."""

    @property
    def end(self) -> int:
        return self.start + len(self.lines)


def read_appended(path: Path, size: int = 0, tail: str = _EMPTY) -> AppendedLines:
    """The complete lines after the first `size` bytes of a file, if these still end with `tail`; else all lines.
    Empty if there is no file.

    Assumes that a file is only appended to, or replaced by one that differs near its end, as `Scores` does.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        with reading(path), open(path, "rb", buffering=0) as file:
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            content = file.readall()
    except FileNotFoundError:
        return AppendedLines(0, b"", _EMPTY)
    previous, lines = content[: size - start], content[size - start :]
    if len(previous) != size - start or hashlib.sha256(previous).hexdigest() != tail:
        return read_appended(path) if size else AppendedLines(0, b"", _EMPTY)
    lines = lines[: lines.rfind(b"\n") + 1]
    return AppendedLines(
        size, lines, hashlib.sha256((previous + lines[-TAIL_BYTES:])[-TAIL_BYTES:]).hexdigest() if lines else tail
    )


def _lock_file(path: Path) -> int:
    while True:
        with writing(path):
            new = not path.exists()
            descriptor = os.open(path, _FLAGS, 0o666)
            if new:
                sync_directory(path.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # replaced while we waited, for example by a rewind
        except OSError as error:
            os.close(descriptor)
            raise RunError(
                f"{path}: this file system does not support locks (flock: {error.strerror}). Choose another folder."
            ) from error
        os.close(descriptor)


def _append(descriptor: int, text: bytes, durable: bool = True) -> None:
    """Append `text`, which ends with a newline. After a partial line of a killed writer, it starts on a new line.

    Raises:
        OSError: the disk refuses. The file is unchanged.
    """
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        text = b"\n" + text
    num_written = os.write(descriptor, text)
    try:
        if num_written < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if durable:
            os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _truncate(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes, if it is longer."""
    if path.exists() and path.stat().st_size > size:
        with writing(path):
            os.truncate(path, size)
