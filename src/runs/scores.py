"""The scores of one run: append-only JSON lines that survive a kill in the middle of a line, and haven's score_list.pkl."""

import contextlib
import io
import itertools
import json
import logging
import math
import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from src.errors import DataError, RunError
from src.files import reading, sync_directory, write_atomic, writing
from src.runs import jsonl_records

SCORES = "scores.jsonl"
SCORE_LIST = "score_list.pkl"

log = logging.getLogger(__name__)
Row = dict[str, Any]
"""An int "step" and, by name, numbers or None."""


class Scores:
    """scores.jsonl in the folder of a run: one row per step, in the order of the steps."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self._last_step: int | None = None
        self._mended = False
        self._unsynced = False

    def append(self, row: Mapping[str, Any], durable: bool = True) -> None:
        """Append a row of numbers with an int "step" greater than that of the last row. durable: it is on the disk when this returns.

        NaN and infinity become null, as JSON has neither: one undefined metric must not end a training.

        Raises:
            RunError: the disk refuses. The file is unchanged.
        """
        self._check_writable()
        values = self._json_values(row)
        if not self._mended:
            self.truncate(math.inf)  # a killed process may have left a partial line
        step = row["step"]
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"{self.path}: step {step} cannot follow step {self._last_step}: truncate first.")
        jsonl_records.append(self.path, [values], durable)
        self._unsynced = not durable
        self._last_step = step

    def sync(self) -> None:
        """Have the rows so far on the disk when this returns.

        Raises:
            RunError: the disk refuses.
        """
        if self._unsynced:
            self._unsynced = False
            with writing(self.path), open(self.path, "rb") as file:
                os.fsync(file.fileno())
            sync_directory(self.path.parent)

    def add_to_last_row(self, scores: Mapping[str, Any]) -> None:
        """Add scores to the last row, replacing those of the same names: for measurements after the training.

        Raises:
            DataError: a line that is not a row.
            RunError: the disk refuses. The file is unchanged.
        """
        self._check_writable()
        *before, (_, last) = self._read_lines()
        added = self._json_values({**scores, "step": last["step"]})
        lines = [*(line for line, _ in before), json.dumps({**last, **added}).encode()]
        write_atomic(self.path, b"".join(line + b"\n" for line in lines))

    def rows(self) -> list[Row]:
        """Every complete row. A last line without newline was cut by a crash and is left out.

        Raises:
            DataError: a line that is not a row; names the file and the line.
            RunError: the file cannot be read.
        """
        return [row for _, row in self._read_lines()]

    def truncate(self, step: float) -> None:
        """Drop the rows after `step`, from which a run resumes, and a line that was cut by a crash.

        Raises:
            DataError: a line that is not a row.
            RunError: the disk refuses. The file is unchanged.
        """
        self._check_writable()
        rows = list(itertools.takewhile(lambda pair: pair[1]["step"] <= step, self._read_lines()))
        size = sum(len(line) + 1 for line, _ in rows)
        if self.path.exists() and self.path.stat().st_size > size:
            with writing(self.path):
                os.truncate(self.path, size)
        self._last_step = rows[-1][1]["step"] if rows else None
        self._mended = True

    def export_haven(self) -> None:
        """Write the rows to score_list.pkl; null becomes NaN, which haven's tables skip.

        Raises:
            RunError: the disk refuses. An older score_list.pkl stays.
        """
        self._check_writable()
        rows = [{key: math.nan if value is None else value for key, value in row.items()} for row in self.rows()]
        write_atomic(self.path.with_name(SCORE_LIST), pickle.dumps(rows, protocol=4))

    def _check_writable(self) -> None:
        if self._read_only:
            raise RunError(f"{self.path}: opened for reading only; the process that holds the lease writes.")

    def _json_values(self, row: Mapping[str, Any]) -> Row:
        """The row as it is written."""
        if type(row.get("step")) is not int:
            raise TypeError(f"{self.path}: a row needs an int 'step', got {row!r}.")
        values = {"step": row["step"]}
        for key, value in row.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{self.path}: {key!r} is not a number: {value!r} ({type(value).__name__}).")
            values[key] = int(value) if isinstance(value, Integral) else float(value)
            if not math.isfinite(values[key]):
                log.warning("%s: %s at step %d is %s; written as null.", self.path, key, row["step"], value)
                values[key] = None
        return values

    def _read_lines(self) -> list[tuple[bytes, Row]]:
        """Complete lines, without their newlines, with their rows."""
        lines = jsonl_records.complete_lines(self.path)
        return list(zip(lines, parse_lines(lines, self.path), strict=True))


def parse_lines(lines: Sequence[bytes], path: Path) -> list[Row]:
    """The rows in the first lines of the scores file `path`.

    Raises:
        DataError: a line that is not a row; names the file and the line.
    """
    # Parsing all lines at once is several times faster than one by one.
    rows = _load_list(b"[" + b",".join(lines) + b"]")
    if len(rows) != len(lines) or not all(map(_is_row, rows)):
        rows = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return rows


def _load_list(text: bytes) -> list[Any]:
    """A JSON list; empty if it is malformed. An integer of more than 64 bits becomes a float."""
    import orjson  # 20 ms, which a start need not spend

    with contextlib.suppress(ValueError):  # json also reads NaN, and halves of surrogate pairs
        return orjson.loads(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []


def last_row(path: Path) -> Row | None:
    """The last complete row of the scores file `path`; None if there is none yet. Reads only the end of the file.

    Raises:
        DataError: the last complete line is not a row.
        RunError: the file cannot be read.
    """
    _, line = next(jsonl_records.lines_from_end(path), (0, None))
    return None if line is None else _parse(line, f"{path}: its last line")


def read_score_list(path: Path) -> list[dict[str, Any]]:
    """The rows of a score_list.pkl that haven wrote, with numpy's scalars as Python numbers.

    Unpickles only containers and numbers, so an untrusted file cannot run code.

    Raises:
        DataError: the file is truncated, or holds anything else.
    """
    try:
        with reading(path, DataError):
            rows = _Numbers(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, struct.error) as error:
        raise DataError(f"{path}: expected a pickled list of dicts of numbers, got {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a pickled list of dicts, got {type(rows).__name__}.")
    return rows


class _Dtype:
    """Replaces numpy.dtype while unpickling, so that numpy is not imported."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = "<" if state[1] == "|" else state[1]


_FORMATS: dict[str, str] = dict(zip(["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"], "dfeqihbQIHB?", strict=True))


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return struct.unpack(dtype.order + _FORMATS[dtype.code], data)[0]


_ALLOWED: dict[str, Any] = {
    "builtins.set": set,
    "__builtin__.set": set,  # as protocols 0 to 2 spell it
    "collections.OrderedDict": dict,
    "numpy.dtype": _Dtype,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray.scalar": _scalar,  # numpy 1
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # how protocols 0 to 2 spell bytes
}


class _Numbers(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _ALLOWED[f"{module}.{name}"]


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and type(row.get("step")) is int


_REASONS = {UnicodeDecodeError: "not UTF-8 text", RecursionError: "nested too deeply"}


def _parse(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else _REASONS.get(type(error), str(error))
        raise DataError(f"{where}: not a row of scores: {reason}. Remove this line, or start over with -r 1.") from None
    if not _is_row(row):
        raise DataError(f"{where}: expected a row with an int 'step', got {line[:60].decode(errors='replace')!r}.")
    return row
