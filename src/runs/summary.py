"""The last value of each score of a run, so that tables need not read histories.
A summary is valid while scores.jsonl starts with the same bytes."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.errors import DataError
from src.runs.jsonl_records import AppendedLines, read_appended
from src.runs.scores import Row, parse_lines

SUMMARY = "last_scores"
"""The key of the summary in status.json."""


@dataclass
class Summary:
    """Summary of the first `size` bytes of a scores.jsonl, which end with a newline."""

    size: int = 0
    tail: str = hashlib.sha256(b"").hexdigest()
    step: int | None = None
    last: dict[str, float | None] = field(default_factory=dict)
    """The last value of each score, in order of first appearance; None for a score that ended in NaN or infinity."""

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add later rows. Null, NaN and infinity replace an earlier value; missing keys do not.
        Values of other types are ignored."""
        for row in rows:
            if is_finite(step := row.get("step")):  # haven's rows can contain anything
                self.step = step
            for name, value in row.items():
                if value is None or isinstance(value, int | float):
                    self.last[name] = value if is_finite(value) else None
        self.last.pop("step", None)

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON, for `parse_summary`. Lists preserve the order of scores, as write_json sorts keys."""
        return {
            "bytes": self.size,
            "tail": self.tail,
            "step": self.step,
            "names": list(self.last),
            "values": list(self.last.values()),
        }


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number. Numbers above 1e150 count as infinite, since their squares overflow."""
    return isinstance(value, (int, float)) and -1e150 < value < 1e150


def parse_summary(value: Any) -> Summary | None:
    """The inverse of `to_json`; None for anything else."""
    if not isinstance(value, dict):
        return None
    size, tail, step, names, values = (value.get(key) for key in ("bytes", "tail", "step", "names", "values"))
    if type(size) is not int or not isinstance(tail, str) or not (step is None or type(step) is int):
        return None
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        return None
    if all(type(name) is str for name in names) and all(
        item is None or (type(item) is not bool and is_finite(item)) for item in values
    ):
        return Summary(size, tail, step, dict(zip(names, values, strict=True)))
    return None


def summarize(path: Path, saved: Any = None) -> Summary:
    """Summary of the scores.jsonl `path`, which need not exist.

    saved: an earlier result of `Summary.to_json`. If it is still valid, only later rows are read.

    Raises:
        DataError: a line that is not a row; names the file and the line.
        RunError: the file cannot be read.
    """
    earlier = parse_summary(saved)
    piece = read_appended(path, earlier.size, earlier.tail) if earlier else read_appended(path)
    if earlier is None or piece.start == 0:
        summary = Summary()
    else:
        summary = Summary(earlier.size, earlier.tail, earlier.step, dict(earlier.last))
    if piece.lines:
        try:
            summary.add(parse_rows(piece, path))
        except DataError:
            if piece.start:
                return summarize(path)  # counts lines from the start of the file, for the message
            raise
    summary.size, summary.tail = piece.end, piece.tail
    return summary


def parse_rows(piece: AppendedLines, path: Path) -> list[Row]:
    """The rows in the lines of `piece`.

    Raises:
        DataError: a line that is not a row; its number is counted from the start of the piece.
    """
    return parse_lines(piece.lines.split(b"\n")[:-1], path)
