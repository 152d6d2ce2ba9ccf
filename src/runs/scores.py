"""The scores of one run: append-only JSON lines that survive a kill within a line, and haven's score_list.pkl."""

import contextlib
import io
import itertools
import json
import logging
import math
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

from src.errors import DataError, RunError
from src.files import reading, sync_directory, write_atomic, writing
from src.runs import jsonl_records
from src.support.parsing import parse_json

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
        self._is_repaired = False
        self._has_unsynced_rows = False

    def append(self, row: Mapping[str, Any], durable: bool = True) -> None:
        """Append a row of numbers with an int "step" greater than that of the last row. durable: sync it to disk.

        NaN and infinity become null, as JSON has neither: an undefined metric must not end a training.

        Raises:
            RunError: the disk refuses. The file is unchanged.
        """
        self._check_writable()
        values = self._json_values(row)
        if not self._is_repaired:
            self.truncate(math.inf)  # a killed process can leave a partial line
        step = row["step"]
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"{self.path}: step {step} cannot follow step {self._last_step}: truncate first.")
        jsonl_records.append(self.path, [values], durable)
        self._has_unsynced_rows = not durable
        self._last_step = step

    def sync(self) -> None:
        """Sync the rows so far to disk.

        Raises:
            RunError: the disk refuses.
        """
        if self._has_unsynced_rows:
            self._has_unsynced_rows = False
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
        new_values = self._json_values({**scores, "step": last["step"]})
        lines = [*(line for line, _ in before), json.dumps({**last, **new_values}).encode()]
        write_atomic(self.path, b"".join(line + b"\n" for line in lines))

    def rows(self) -> list[Row]:
        """All complete rows. A last line without newline was truncated by a crash and is left out.

        Raises:
            DataError: a line that is not a row; names the file and the line.
            RunError: the file cannot be read.
        """
        return [row for _, row in self._read_lines()]

    def truncate(self, step: float) -> None:
        """Drop the rows after `step`, from which a run resumes, and a partial line from a crash.

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
        self._is_repaired = True

    def export_haven(self) -> None:
        """Write the rows to score_list.pkl; null becomes NaN, which haven's tables skip.

        Raises:
            RunError: the disk refuses. An older score_list.pkl is unchanged.
        """
        self._check_writable()
        rows = [{key: math.nan if value is None else value for key, value in row.items()} for row in self.rows()]
        write_atomic(self.path.with_name(SCORE_LIST), pickle.dumps(rows, protocol=4))

    def _check_writable(self) -> None:
        if self._read_only:
            raise RunError(f"{self.path}: opened for reading only; the process that holds the lease writes.")

    def _json_values(self, row: Mapping[str, Any]) -> Row:
        """The row with JSON values."""
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
        """(line without newline, row) for each complete line."""
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
    import orjson  # takes 20 ms; not needed at start

    with contextlib.suppress(ValueError):  # json also reads NaN, and halves of surrogate pairs
        return orjson.loads(text)
    try:
        return parse_json(text, "", DataError)
    except DataError:
        return []


def last_row(path: Path) -> Row | None:
    """The last complete row of the scores file `path`; None before the first one. Reads only the end of the file.

    Raises:
        DataError: the last complete line is not a row.
        RunError: the file cannot be read.
    """
    _, line = next(jsonl_records.lines_from_end(path), (0, None))
    return None if line is None else _parse(line, f"{path}: its last line")


def read_score_list(path: Path) -> list[dict[str, Any]]:
    """The rows of a score_list.pkl that haven wrote, with numpy scalars as Python numbers,
    and `Opaque` for other objects.

    Imports and calls nothing that the file names, so an untrusted file cannot run code.

    Raises:
        DataError: the file is damaged, or is not a list of dicts.
    """
    try:
        with reading(path, DataError):
            content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    try:
        rows = _ScoreListReader(content).load()
    except Exception as error:  # noqa: BLE001  a damaged pickle raises anything: MemoryError, RecursionError, AttributeError, …
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{path}: damaged: expected a pickled list of dicts of numbers, got {reason}. Restore it from a copy."
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a pickled list of dicts, got {type(rows).__name__}.")
    return rows


class Opaque:
    """Placeholder for an object of a pickle that is not read, shown as `<numpy.ndarray>`.
    Its content is dropped."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def append(self, _: Any) -> None:
        """For instances of subclasses of list."""

    extend = add = append

    def __setitem__(self, _: Any, __: Any) -> None: ...


class _Dtype(Opaque):
    """Stands in for numpy.dtype, without importing numpy."""

    def __init__(self, code: str) -> None:
        super().__init__("numpy.dtype")
        self.code, self.order = code, "<"


_FORMATS: dict[str, str] = dict(
    zip(["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"], "dfeqihbQIHB?", strict=True)
)


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    if dtype.code not in _FORMATS:  # such as a date or a string
        return Opaque(f"numpy.{dtype.code}")
    return struct.unpack(dtype.order + _FORMATS[dtype.code], data)[0]


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "builtins.set": set,
    "__builtin__.set": set,  # as protocols 0 to 2 spell it
    "collections.OrderedDict": dict,
    "collections.defaultdict": lambda *_: {},
    "numpy.dtype": lambda code, *_: _Dtype(code),
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray.scalar": _scalar,  # numpy 1
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # how protocols 0 to 2 spell bytes
}
"""Constructors by the name in the pickle."""
_REBUILDERS = {
    "_reconstruct": "numpy.ndarray",
    "_reconstructor": "object",
    "_frombuffer": "numpy.ndarray",
    "_rebuild_parameter": "torch.Parameter",
}
"""Function in a pickle that rebuilds an object -> name of the object."""


def _construct(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Opaque) or not isinstance(arguments, tuple):
        raise pickle.UnpicklingError(f"a call of {type(function).__name__}")
    if constructor := _CONSTRUCTORS.get(function.name):
        return constructor(*arguments)
    name = function.name.rpartition(".")[2]
    if name.startswith("_rebuild_tensor"):
        return Opaque("torch.Tensor")
    if name in _REBUILDERS:
        of_class = arguments[0] if arguments and isinstance(arguments[0], Opaque) else None
        return Opaque(of_class.name if of_class and name != "_frombuffer" else _REBUILDERS[name])
    return Opaque(function.name)


_Unpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]  not in its stubs


class _ScoreListReader(_Unpickler):
    """Reads a pickle without calling anything that it names.

    Uses Python's unpickler in Python: the one in C can allocate 64 GB or more for a damaged length.
    """

    dispatch: ClassVar = dict(_Unpickler.dispatch)

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._size = len(content)

    def find_class(self, module: str, name: str) -> Opaque:
        return Opaque(f"{module}.{name}")

    def persistent_load(self, _: Any) -> Opaque:
        return Opaque("persistent")

    def get_extension(self, code: int) -> None:
        self.append(Opaque(f"extension {code}"))

    def _instantiate(self, function: Any, arguments: Any) -> None:
        self.append(_construct(function, tuple(arguments)))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _construct(self.stack[-1], arguments)

    def load_newobj_ex(self) -> None:
        self.stack.pop()
        self.load_reduce()

    def load_build(self) -> None:
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, _Dtype):
            instance.order = state[1] if state[1] in (">", "=") else "<"

    def load_bytearray8(self) -> None:
        length = int.from_bytes(self.read(8), "little")
        if length > self._size:
            raise pickle.UnpicklingError(f"{length} bytes in a file of {self._size}")
        self.append(bytearray(self.read(length)))

    for _opcode, _load in (
        (pickle.REDUCE, load_reduce),
        (pickle.NEWOBJ, load_reduce),
        (pickle.NEWOBJ_EX, load_newobj_ex),
        (pickle.BUILD, load_build),
        (pickle.BYTEARRAY8, load_bytearray8),
    ):
        dispatch[_opcode[0]] = _load


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and type(row.get("step")) is int


def _parse(line: bytes, where: str) -> Row:
    try:
        row = parse_json(line, where, DataError)
    except DataError as error:
        reason = str(error).removeprefix(f"{where}: ")
        raise DataError(f"{where}: not a row of scores: {reason} Remove this line, or start over with -r 1.") from None
    if not _is_row(row):
        raise DataError(
            f"{where}: expected a row with an int 'step', got {line[:60].decode(errors='replace')!r}. "
            "Remove this line, or start over with -r 1."
        )
    return row
