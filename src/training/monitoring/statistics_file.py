"""statistics.jsonl: what tensors looked like at some steps, a JSON line for each of them. Rank 0 only.

A line is {"step", "name", "type" (the class, of a module), "context", "var_min", …}, in the order of the steps. A run that continues drops
the lines after the step that it continues from, as it makes them again.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from src.errors import DataError
from src.files import reading, writing

FILE = "statistics.jsonl"
_WINDOW = 2**20


def append(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add records, each with an int "step" first, to the file in the save directory `folder`.

    Raises:
        RunError: the disk refuses.
    """
    path = folder / FILE
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(text)


def truncate(folder: Path, step: int) -> None:
    """Drop the records after `step`, and a line that a killed process left torn.

    Raises:
        RunError: the disk refuses.
        DataError: a line at the end that is no record; names it.
    """
    path = folder / FILE
    try:
        with reading(path), open(path, "rb") as file:
            end, size = _end(path, file, step)
    except FileNotFoundError:
        return
    if end < size:
        with writing(path):
            os.truncate(path, end)


def _end(path: Path, file: Any, step: int) -> tuple[int, int]:
    """Where the last whole line of a step up to `step` ends, and where the file ends. It may be long, so looks at its end first."""
    size, window = file.seek(0, os.SEEK_END), _WINDOW
    while True:
        start = max(0, size - window)
        file.seek(start)
        lines = file.read(size - start).split(b"\n")[:-1]
        if start and lines:
            start += len(lines.pop(0)) + 1  # the end of a line that began before
        if size <= window or (lines and _step(path, lines[0]) <= step):
            kept = [line for line in lines if _step(path, line) <= step]
            return start + sum(len(line) + 1 for line in kept), size
        window *= 8


def _step(path: Path, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path}: not a record of statistics: {line[:60].decode(errors='replace')!r}. Remove this line.") from None
