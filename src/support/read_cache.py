"""Values read from save directories, reused while a directory is unchanged:
for a page that reads the same folder every few seconds."""

import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

SETTLED_SECONDS = 2.0
"""A more recent change can be followed by one with the same timestamp:
clocks of file systems tick in milliseconds, some in seconds."""
TURNS = 60
"""Each value is read again after this many turns, as a file edited in place does not change its directory."""
T = TypeVar("T")
Mark = tuple[int, int, int]
"""Modification time, change time and inode of a directory."""


@dataclass
class ReadCache(Generic[T]):
    """The values of one folder of runs.
    Only for runs that no process writes to: an appended file does not change its directory."""

    runs: Path
    _values: dict[str, tuple[Mark, T]] = field(default_factory=dict)
    _turn: int = 0

    def read(self, names: list[str]) -> tuple[dict[str, T], dict[str, Mark]]:
        """The values that are still valid, and for each other run the mark to pass to `save` once it has been read."""
        self._turn += 1
        due, folder, latest = self._turn % TURNS, str(self.runs), time.time_ns() - SETTLED_SECONDS * 1e9
        valid: dict[str, T] = {}
        marks: dict[str, Mark] = {}
        for name in names:
            try:
                now = os.stat(f"{folder}/{name}")
            except OSError:
                continue  # reading it gives the error
            mark, (saved, value) = (now.st_mtime_ns, now.st_ctime_ns, now.st_ino), self._values.get(name, (None, None))
            if mark == saved and zlib.crc32(name.encode()) % TURNS != due:
                valid[name] = value  # type: ignore[assignment]  there is one where a mark was saved
            elif now.st_ctime_ns <= latest:
                marks[name] = mark
        return valid, marks

    def save(self, name: str, marks: dict[str, Mark], value: T) -> None:
        """Reuse `value` while the directory has its mark; without a mark it changed too recently."""
        if name in marks:
            self._values[name] = marks[name], value
