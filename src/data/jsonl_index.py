"""An index of a JSONL file: end and group of each row. It is written once, when the rows are checked; later starts map
it."""

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from src import files
from src.errors import DataError, RunError

MIN_BYTES = 1 << 25
"""Smaller files are parsed at each start, in about half a second."""
_FORMAT = 1
_BLOCKS, _BLOCK_BYTES = 16, 4096
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowIndex:
    """Offsets and groups of the rows of a file, in memory or mapped from an index file."""

    ends: Sequence[int]
    """Byte offsets at which rows end, after a 0."""
    groups: Sequence[int]
    """For each row, the number of its group in `names`; empty without groups."""
    names: Sequence[str]
    place: tuple[Path, Mapping[str, Any]] | None = None
    """The index file and its key, if the index is mapped."""

    def __reduce__(self) -> Any:
        """A copy in another process maps the same index, or fails if it was replaced."""
        return (_reopen, self.place) if self.place else (RowIndex, (self.ends, self.groups, self.names))


def key_of(file: BinaryIO, facts: object, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The key of an index: the manifest's `facts`; size, time and some blocks of the open file; and the rules."""
    digest, state = hashlib.sha256(), os.fstat(file.fileno())
    for number in range(_BLOCKS):
        file.seek(max(0, state.st_size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK_BYTES))
    file.seek(0)
    return {
        "format": [_FORMAT, sys.byteorder],
        "file": facts,
        "bytes": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "content_sample": digest.hexdigest(),
        "rules": dict(rules),
    }


def read(path: Path, key: Mapping[str, Any]) -> RowIndex | None:
    """Map the index of `path`; None if there is no index with this key."""
    return next((index for place in places(path, key) if (index := _map(place, key)) is not None), None)


@contextlib.contextmanager
def one_builder(file: BinaryIO) -> Iterator[None]:
    """Run the block in one process at a time for this file, if its file system has locks. NFS has no locks for
    readers."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def write(
    path: Path, key: Mapping[str, Any], ends: "array[int]", groups: "array[int]", names: Sequence[str]
) -> RowIndex:
    """Save an index next to `path`, or in the user's cache if that is not writable. Return it, mapped if it was saved.

    ends, groups: arrays of type "Q" and "I".

    Safe for several processes at once: each writes the same bytes under a temporary name, then replaces the file.
    """
    header = json.dumps({"key": key, "rows": len(ends) - 1, "names": names}).encode()
    header += b" " * (-(len(header) + 1) % 8) + b"\n"
    data = b"".join((header, memoryview(ends), memoryview(groups)))
    place = save(path, key, data)
    return (place and _map(place, key)) or RowIndex(ends, groups, names)


def save(path: Path, key: Mapping[str, Any], data: bytes) -> Path | None:
    """Write a file derived from `path` to the first writable one of its `places`; None if no place is writable."""
    for place in places(path, key):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(place, data)
        except (OSError, RunError) as error:
            log.info("%s: not saved: %s", place, error)
            continue
        return place
    return None


def places(path: Path, key: Mapping[str, Any]) -> list[Path]:
    """Possible paths of a file derived from `path`: next to it, or in the user's cache.
    The name has a hash of the rules."""
    name = hashlib.sha256(json.dumps(key["rules"], sort_keys=True).encode()).hexdigest()[:8]
    whole = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainval"
    return [path.with_name(f".{path.name}.{name}.index"), cache / f"{path.name}.{whole}.{name}.index"]


def _map(place: Path, key: Mapping[str, Any]) -> RowIndex | None:
    """Map the index in a file; None if it is missing, damaged, or has another key."""
    try:
        with open(place, "rb") as file:
            header = files.parse_json(file.readline(), place, DataError)
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            first = file.tell()
        rows, names = header["rows"], header["names"]
        middle = first + 8 * (rows + 1)
        ends, groups = view[first:middle].cast("Q"), view[middle:].cast("I")
        whole = (header["key"], len(ends), len(groups)) == (key, rows + 1, rows if names else 0)
        return (
            RowIndex(ends, groups, names, (place, key))
            if whole and ends[0] == 0 and ends[rows] == key["bytes"]
            else None
        )
    except (OSError, DataError, ValueError, TypeError, KeyError, IndexError):
        return None


def _reopen(place: Path, key: Mapping[str, Any]) -> RowIndex:
    index = _map(place, key)
    if index is None:
        raise DataError(f"{place}: the row index was removed or replaced during this run. Start the run again.")
    return index
