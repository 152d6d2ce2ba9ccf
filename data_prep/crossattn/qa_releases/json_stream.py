"""Read a JSON file of any size record by record: lines, a list, a list in an object, or columns; plain or gzip."""

import codecs
import contextlib
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from src.data import jsonl
from src.errors import DataError
from src.files import reading

LISTS = ("data", "Data")
"""Names of the list of records in a top-level object, as in SQuAD and TriviaQA."""

_GZIP = b"\x1f\x8b"
_PIECE = 1 << 20
_NEAR_END = 16  # characters: a truncated literal, number or escape of JSON is never longer
_SPACE = " \t\n\r"
_SPACES = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()

Record = dict[str, Any]
Bytes = BinaryIO | gzip.GzipFile


def records(
    path: Path, columns: Sequence[str] = (), counts: Counter[str] | None = None
) -> Iterator[tuple[str, Record]]:
    """Yield ("FILE:LINE" or "FILE: item N", record) for each record of a file, with one record in memory at a time.

    columns: members to read from a file of columns, {"name": {"0": value, "1": value}}. All columns have their keys in
    the same order.
    counts: its "blank" is increased by the number of blank lines.

    Raises:
        DataError: the file is missing, empty, truncated or damaged, or a record is not a JSON object. The message has
            the file and the place.
    """
    form, key = _form(path)
    if form == "lines":
        yield from lines(path, counts)
    elif form == "columns":
        yield from _rows_of_columns(path, columns)
    else:
        for number, value in _items(path, key):
            where = f"{path}: item {number}"
            if not isinstance(value, dict):
                raise DataError(f"{where}: expected a JSON object, got {json.dumps(value)[:60]}.")
            yield where, value


@contextlib.contextmanager
def open_bytes(path: Path, packed: bool | None = None) -> Iterator[Bytes]:
    """Open a file, decompressed if it is `packed` (None: if it starts with the signature of gzip).
    Raises DataError if it is damaged."""
    try:
        with reading(path, DataError):
            if packed is None:
                with open(path, "rb") as raw:
                    packed = raw.read(2) == _GZIP
            try:
                with gzip.open(path) if packed else open(path, "rb") as file:
                    yield file
            except EOFError:
                raise DataError(f"{path}: the gzip file is truncated. Download it again.") from None
            except (gzip.BadGzipFile, zlib.error) as bad:
                raise DataError(f"{path}: damaged gzip file ({bad}). Download it again.") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None


def _form(path: Path) -> tuple[str, str | None]:
    """(form, name) of a file: "list" and the member with the list (None if it is the file), "columns" or "lines"."""
    with open_bytes(path) as file:
        text = _Scanner(file, path)
        first = text.peek()
        if first == "[":
            return "list", None
        if first != "{":
            raise DataError(
                f"{path}: expected JSON (a list, an object, or one object per line), "
                f"got {f'a file that starts with {first!r}' if first else 'an empty file'}."
            )
        for key in text.members():
            first = text.peek()
            if first == "[" and key in LISTS:
                return "list", key
            if first != "{":
                text.skip()
                continue
            for number, name in enumerate(text.members()):
                if number == 0 and name.isdigit():
                    return "columns", None
                text.skip()
    return "lines", None


def lines(path: Path, counts: Counter[str] | None = None) -> Iterator[tuple[str, Record]]:
    """Yield ("FILE:LINE", record) for each line that is not blank. Counts and errors: see `records`."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, jsonl.parse(line, where)
            elif counts is not None:
                counts["blank"] += 1


def _items(path: Path, key: str | None) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, value) for each item of a list. Reads the rest of the file to detect truncation."""
    with open_bytes(path) as file:
        text = _Scanner(file, path)
        if key is None:
            for number in text.items():
                yield number, text.value()
        else:
            for name in text.members():
                if name == key:
                    for number in text.items():
                        yield number, text.value()
                else:
                    text.skip()
        text.end()


def _rows_of_columns(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Read all columns in parallel, each with its own pass through the file."""
    readers = [_column(path, column) for column in columns]
    for cells in zip_longest(*readers, fillvalue=("nothing", None)):
        keys = [key for key, _ in cells]
        if len(set(keys)) > 1:
            raise DataError(
                f"{path}: the columns {', '.join(columns)} must list the same rows, but continue with the rows "
                f"{', '.join(keys)}. Download the file again."
            )
        yield f"{path}: row {keys[0]!r}", {column: value for column, (_, value) in zip(columns, cells, strict=True)}


def _column(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    with open_bytes(path) as file:
        text = _Scanner(file, path)
        names = []
        for name in text.members():
            names.append(name)
            if name == column:
                for key in text.members():
                    yield key, text.value()
            else:
                text.skip()
        text.end()
        if column not in names:
            raise DataError(
                f"{path}: column {column!r} is missing. Columns: {', '.join(names)}. Download the file again."
            )


class _Scanner:
    """Forward-only JSON reader with only the current part in memory."""

    def __init__(self, file: Bytes, path: Path) -> None:
        self._file = file
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._num_consumed = 0
        self._is_at_end = False

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            if self._at < len(self._text) and (character := self._text[self._at]) not in _SPACE:
                return character
            self._at = _SPACES.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]  it always matches
            if self._at == len(self._text) and not self._more():
                return ""

    def items(self) -> Iterator[int]:
        """Yield the number, from 1, of each item of a list; the caller reads the item before the next one."""
        yield from self._between("[", "]")

    def members(self) -> Iterator[str]:
        """Yield the name of each member of an object; the caller reads its value before the next one."""
        for _ in self._between("{", "}"):
            if self.peek() != '"':
                raise self._syntax_error("a name in double quotes")
            name = self.value()
            self._take(":")
            yield name

    def value(self) -> Any:
        """Read the next value.

        Raises:
            DataError: the text is truncated or is not JSON.
        """
        while True:
            self.peek()
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as bad:
                cut_off = bad.msg.startswith("Unterminated string") or bad.pos > len(self._text) - _NEAR_END
                beyond = bad.pos - self._at
                if cut_off and self._more():
                    continue
                self._at += beyond
                if cut_off:
                    raise DataError(
                        f"{self._path}: ends within a value {self._place()}, so it is truncated. Download it again."
                    ) from None
                raise DataError(
                    f"{self._path}: not valid JSON {self._place()} ({bad.msg}). Correct the file."
                ) from None
            except RecursionError:
                raise DataError(f"{self._path}: nested too deeply {self._place()}. Make it flatter.") from None
            except ValueError as bad:
                raise DataError(
                    f"{self._path}: a number cannot be read {self._place()} ({str(bad).split(';')[0]}). Shorten it."
                ) from None
            if end == len(self._text) and type(value) in {int, float} and self._more():
                continue  # the number can continue
            self._at = end
            return value

    def skip(self) -> None:
        """Skip the next value, with one of its members in memory at a time."""
        first = self.peek()
        if first == "[":
            for _ in self.items():
                self.value()
        elif first == "{":
            for _ in self.members():
                self.value()
        else:
            self.value()

    def end(self) -> None:
        """Raise DataError if the text continues."""
        if self.peek():
            raise self._syntax_error("the end of the file")

    def _between(self, opening: str, closing: str) -> Iterator[int]:
        self._take(opening)
        number = 0
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            number += 1
            yield number
            if self.peek() == closing:
                self._at += 1
                return
            self._take(",")

    def _take(self, character: str) -> None:
        if self.peek() != character:
            raise self._syntax_error(repr(character))
        self._at += 1

    def _syntax_error(self, expected: str) -> DataError:
        if not (got := self.peek()):
            return DataError(
                f"{self._path}: ends {self._place()}, where {expected} should follow, so it is truncated. "
                "Download it again."
            )
        return DataError(f"{self._path}: not valid JSON {self._place()}: expected {expected}, got {got!r}.")

    def _place(self) -> str:
        return f"at character {self._num_consumed + self._at + 1}"

    def _more(self) -> bool:
        """Read at least as much as is in the buffer, to parse a long value only a few times. False at the end."""
        if self._is_at_end:
            return False
        data = self._file.read(max(_PIECE, len(self._text) - self._at))
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as bad:
            raise DataError(
                f"{self._path}: not UTF-8 text after character {self._num_consumed + len(self._text)} ({bad.reason}). "
                "Convert it to UTF-8."
            ) from None
        self._is_at_end = not data
        self._text = self._text[self._at :] + text
        self._num_consumed += self._at
        self._at = 0
        return bool(data)
