"""Sources of documents to be tokenised: text and JSON files, parquet, folders saved by `datasets`, and sets of the hub.

A source is read in batches that do not depend on who asks, so that a run can go on where another stopped. Lines of JSON are handed
on as they are: whoever tokenises them parses them too.
"""

import gzip
import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_prep.qa_releases import json_stream
from src.data import jsonl
from src.errors import DataError
from src.files import reading, sha256

HUB = "hub:"
DocumentsBy = Literal["file", "line", "paragraph"]
_SAVED = ("dataset_dict.json", "dataset_info.json")
_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_TEXT = (".txt", ".txt.gz", ".md")
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 21


@dataclass(frozen=True)
class Batch:
    """Consecutive documents: lines of JSON, numbered from `first_line`, or texts with their places."""

    source: str
    """The path of the file of the lines."""
    lines: Sequence[bytes] = ()
    first_line: int = 0
    texts: Sequence[tuple[str, str]] = ()
    """("FILE:LINE" or the like, text)."""
    state: Any = None
    """The position at which the source continues after this batch; None: it must be read from its beginning."""

    def documents(self, field: str) -> list[str]:
        """The texts.

        Raises:
            DataError: a line is no JSON object with the text `field`; names it.
        """
        if self.texts:
            return [text for _, text in self.texts]
        return [text_of(jsonl.parse(line, where), field, where) for where, line in self._numbered_lines()]

    def _numbered_lines(self) -> Iterator[tuple[str, bytes]]:
        for number, line in enumerate(self.lines, self.first_line):
            yield f"{self.source}:{number}", line


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text of a row.

    Raises:
        DataError: it has none; names the place and the fields.
    """
    if field not in row:
        raise DataError(f"{where}: field {field!r} is missing. Fields: {', '.join(row) or 'none'}. --text_field names another.")
    jsonl.check_type(row[field], str, f"{where}: field {field!r}")
    return row[field]


@dataclass(frozen=True)
class Source:
    """Documents of one file, folder or set."""

    name: str
    """As given by the user."""
    facts: dict[str, Any]
    """Equal for equal data in any folder."""
    read: Callable[[Any], Iterator[Batch]]
    """All batches, or those after the one with the given `state`."""


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    field: str
    """The field of the text in JSON objects and table rows."""
    documents_by: DocumentsBy
    """The unit of a text file that is a document; paragraphs end with blank lines."""
    streaming: bool
    """Read sets of the hub over the network while they are tokenised, without writing them to the disk."""


def open_source(name: str, split: str, how: Reading) -> Source:
    """The source called `name`: a path, or hub:ID or hub:ID@CONFIG. split: the one to read of a set with several.

    Raises:
        DataError: there is no such source, or none that is known how to read.
    """
    path = Path(name)
    if name.startswith(HUB):
        return _hub(name, split, how)
    if path.is_dir():
        return _open_saved(path, split, how)
    if not path.is_file():
        hint = f' A set of the hub is written "{HUB}{name}".' if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", name) else ""
        raise DataError(f"{name}: no such file.{hint}")
    with reading(path, DataError):
        facts = {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
    if name.endswith(_LINES):
        return Source(name, facts, lambda _state: _line_batches(path))
    if name.endswith(_TEXT):
        return Source(name, facts, lambda _state: _group_documents(name, _text_documents(path, how.documents_by)))
    if name.endswith(".parquet"):
        return Source(name, facts, lambda _state: _group_documents(name, _parquet(path, how.field)))
    if name.endswith((".json", ".json.gz")):
        return Source(name, facts, lambda _state: _group_documents(name, _rows(json_stream.records(path), how.field)))
    kinds = ", ".join((*_LINES, *_TEXT, ".json", ".json.gz", ".parquet"))
    raise DataError(f"{name}: what kind of file this is cannot be told from its name. Known: {kinds}.")


def _rows(records: Iterable[tuple[str, dict[str, Any]]], field: str) -> Iterator[tuple[str, str]]:
    for where, row in records:
        yield where, text_of(row, field, where)


def _group_documents(source: str, documents: Iterable[tuple[str, str]], state: Callable[[], Any] = lambda: None) -> Iterator[Batch]:
    """state: returns the state after the last document that was read."""
    batch, size = [], 0
    for where, text in documents:
        batch.append((where, text))
        size += len(text)
        if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield Batch(source, texts=batch, state=state())
            batch, size = [], 0
    if batch:
        yield Batch(source, texts=batch)


def _lines(path: Path) -> Iterator[bytes]:
    """Raises DataError where the file cannot be read, or is a damaged or cut-off gzip file."""
    with reading(path, DataError):
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                yield from file
        except EOFError:
            raise DataError(f"{path}: the gzip file is cut off. Get it again.") from None
        except (gzip.BadGzipFile, zlib.error) as bad:
            raise DataError(f"{path}: a damaged gzip file: {bad}. Get it again.") from None


def _line_batches(path: Path) -> Iterator[Batch]:
    batch, size, first = [], 0, 1
    for number, line in enumerate(_lines(path), 1):
        batch.append(line)
        size += len(line)
        if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield Batch(str(path), batch, first)
            batch, size, first = [], 0, number + 1
    if batch:
        yield Batch(str(path), batch, first)


def _text_documents(path: Path, by: DocumentsBy) -> Iterator[tuple[str, str]]:
    """Lines without their line ends; paragraphs and whole files unchanged, except for line ends and surrounding blank lines."""
    parts: list[str] = []
    first = 0
    for number, raw in enumerate(_lines(path), 1):
        try:
            line = raw.decode()
        except UnicodeDecodeError as bad:
            raise DataError(f"{path}:{number}: not UTF-8 text: {bad.reason} at byte {bad.start}.") from None
        if line.strip():
            first = first if parts else number
            parts.append(line)
        elif parts and by == "file":
            parts.append(line)
        if parts and (by == "line" or (by == "paragraph" and not line.strip())):
            yield f"{path}:{first}", "".join(parts).strip("\r\n")
            parts = []
    if parts:
        yield f"{path}:{first}", "".join(parts).strip("\r\n")


def _parquet(path: Path, field: str) -> Iterator[tuple[str, str]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = itertools.count(1)
    try:
        with reading(path, DataError), ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise DataError(f"{path}: column {field!r} is missing. Columns: {', '.join(names)}. --text_field names another.")
            for batch in file.iter_batches(_BATCH_ROWS, columns=[field]):
                yield from _rows(((f"{path}: row {next(number)}", row) for row in batch.to_pylist()), field)
    except pyarrow.ArrowInvalid as bad:
        raise DataError(f"{path}: no parquet file, or a damaged one: {_first_line(bad)}") from None


def _open_saved(folder: Path, split: str, how: Reading) -> Source:
    if not any((folder / name).is_file() for name in _SAVED):
        raise DataError(f"{folder}: a folder, but not one that `datasets` saved: it has neither {' nor '.join(_SAVED)}.")
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # noqa: BLE001  whatever the library says of a damaged folder
        raise DataError(f"{folder}: `datasets` cannot read it: {_first_line(error)}") from None
    rows = _choose_split(loaded, str(folder), split) if isinstance(loaded, dict) else loaded
    return _table(str(folder), folder.name, rows, how)


def _table(name: str, short: str, rows: Any, how: Reading) -> Source:
    """Numbered rows of a data set of `datasets` on the disk."""
    _require_column(rows, name, how.field)
    paths = [Path(file["filename"]) for file in rows.cache_files]
    with reading(Path(name), DataError):
        digest = hashlib.sha256("".join(map(sha256, paths)).encode()).hexdigest()
    facts = {"name": short, "rows": len(rows), "sha256": digest}
    return Source(name, facts, lambda _state: _group_documents(name, _number_rows(rows, name, how.field)))


def _number_rows(rows: Any, name: str, field: str) -> Iterator[tuple[str, str]]:
    return _rows(((f"{name}: row {number}", row) for number, row in enumerate(rows.select_columns([field]), 1)), field)


def _require_column(rows: Any, name: str, field: str) -> None:
    if rows.column_names is not None and field not in rows.column_names:
        raise DataError(f"{name}: column {field!r} is missing. Columns: {', '.join(rows.column_names)}. --text_field names another.")


def _hub(name: str, split: str, how: Reading) -> Source:
    import datasets

    identity, _, config = name.removeprefix(HUB).partition("@")
    try:
        loaded: Any = datasets.load_dataset(identity, config or None, streaming=how.streaming)
        builder = datasets.load_dataset_builder(identity, config or None) if how.streaming else None
    except Exception as error:  # noqa: BLE001  the library raises a dozen kinds for a set that it cannot get
        raise DataError(
            f"{name}: cannot be had from the hub or its cache: {_first_line(error)} Where there is a network, save it with "
            "`datasets` (save_to_disk), copy the folder, and name it here; or name its files."
        ) from None
    rows = _choose_split(loaded, name, split)
    if builder is None:
        return _table(name, name, rows, how)
    _require_column(rows, name, how.field)
    facts = {"name": name, "split": split, "version": str(builder.info.version), "hash": builder.hash}
    return Source(name, facts, lambda state: _stream_rows(rows.select_columns([how.field]), name, how.field, state))


def _stream_rows(rows: Any, name: str, field: str, state: dict[str, Any] | None) -> Iterator[Batch]:
    """Rows that are read over the network; files read before `state` are not fetched again."""
    if state is not None:
        rows.load_state_dict(state["rows"])
    count = state["count"] if state is not None else 0

    def with_places() -> Iterator[tuple[str, dict[str, Any]]]:
        nonlocal count
        for row in rows:
            count += 1
            yield f"{name}: row {count}", row

    yield from _group_documents(name, _rows(with_places(), field), lambda: {"rows": rows.state_dict(), "count": count})


def _choose_split(loaded: Any, name: str, split: str) -> Any:
    names = {"train": ("train",), "val": ("validation", "val", "dev", "test")}[split]
    for candidate in names:
        if candidate in loaded:
            return loaded[candidate]
    raise DataError(f"{name}: has no split {' or '.join(map(repr, names))}. It holds: {', '.join(loaded)}.")


def _first_line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).split("\n", 1)[0][:200]
    return line if line.endswith(".") else f"{line}."
