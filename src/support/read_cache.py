"""A cache of values read from save directories, valid while a directory is unchanged.
For pages that read the same folder every few seconds."""

import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

SETTLED_SECONDS = 2.0
"""After a more recent change, another change can have the same timestamp:
file systems store milliseconds, some only seconds."""
TURNS = 60
"""Each value is read again after this many reads, as a file edited in place does not change its directory."""
T = TypeVar("T")
Mark = tuple[int, int, int]
"""Modification time, change time and inode of a directory."""


@dataclass
class ReadCache(Generic[T]):
    """Cached values for a folder of runs.
    Only for runs that no process writes to: appending to a file does not change its directory."""

    runs: Path
    _values: dict[str, tuple[Mark, T]] = field(default_factory=dict)
    _turn: int = 0

    def read(self, names: list[str]) -> tuple[dict[str, T], dict[str, Mark]]:
        """The values that are still valid, and for the other runs the marks to pass to `save` after reading them."""
        self._turn += 1
        due, folder, latest = self._turn % TURNS, str(self.runs), time.time_ns() - SETTLED_SECONDS * 1e9
        valid: dict[str, T] = {}
        marks: dict[str, Mark] = {}
        for name in names:
            try:
                now = os.stat(f"{folder}/{name}")
            except OSError:
                continue  # reading the run reports the error
            mark, (saved, value) = (now.st_mtime_ns, now.st_ctime_ns, now.st_ino), self._values.get(name, (None, None))
            if mark == saved and zlib.crc32(name.encode()) % TURNS != due:
                valid[name] = value  # type: ignore[assignment]  a saved mark has a value
            elif now.st_ctime_ns <= latest:
                marks[name] = mark
        return valid, marks

    def save(self, name: str, marks: dict[str, Mark], value: T) -> None:
        """Cache `value` while the directory has its mark. Without a mark, the directory changed too recently."""
        if name in marks:
            self._values[name] = marks[name], value
