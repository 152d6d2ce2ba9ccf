"""Read documents to tokenise from text and JSON files, parquet, folders saved by `datasets`, and the hub.

The batches of a source do not depend on the reader, so that a run can resume where another stopped. JSON lines are
passed on unparsed; the tokenising process parses them.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data_prep import sources
from data_prep.crossattn.qa_releases import json_stream
from src.data import jsonl
from src.errors import DataError
from src.experiments.config import nearest_text

DocumentsBy = Literal["file", "line", "paragraph"]
_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_TEXT = (".txt", ".txt.gz", ".md")
_BATCH_BYTES = 1 << 21


@dataclass(frozen=True)
class Batch:
    """Consecutive documents: lines of JSON, numbered from `first_line`, or texts with their places."""

    source: str
    """Path of the file with the lines."""
    lines: Sequence[bytes] = ()
    first_line: int = 0
    texts: Sequence[tuple[str, str]] = ()
    """("FILE:LINE" or similar, text)."""
    state: Any = None
    """Position at which the source continues after this batch; None: it must be read from the start."""

    def documents(self, field: str) -> list[str]:
        """Texts of the documents.

        Raises:
            DataError: a line is not a JSON object with a text in `field`; the message has the line.
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
        DataError: the field is missing; the message has the place and the fields.
    """
    if field not in row:
        raise DataError(
            f"{where}: field {field!r} is missing.{nearest_text([field], row)} Fields: {', '.join(row) or 'none'}. "
            "Choose one with --text_field."
        )
    jsonl.check_type(row[field], str, f"{where}: field {field!r}")
    return row[field]


@dataclass(frozen=True)
class Source:
    """Documents of one file, folder or hub data set."""

    name: str
    """Name as given by the user."""
    facts: dict[str, Any]
    """Identity of the data: equal for equal data in any folder."""
    read: Callable[[Any], Iterator[Batch]]
    """Yields all batches, or those after the batch with the given state."""


@dataclass(frozen=True)
class Reading:
    """Options of reading sources."""

    field: str
    """Field of the text in JSON objects and table rows."""
    documents_by: DocumentsBy
    """Unit of a text file that is one document. Paragraphs are separated by blank lines."""
    streaming: bool
    """Whether to stream hub data sets over the network, without writing them to the disk."""


def open_source(name: str, split: str, how: Reading) -> Source:
    """Open the source `name`; see `sources.open_rows`. split: split to read of a data set with several.

    Raises:
        DataError: the source is missing or of unknown kind.
    """
    path, streaming = Path(name), how.streaming and name.startswith(sources.HUB)
    rows = sources.open_rows(name, sources.HUB_SPLITS[split], streaming)
    if rows is not None:
        if rows.column_names is not None:
            _require_column(rows.column_names, name, how.field)
        return _stream(name, split, rows, how) if streaming else _table(name, rows, how)
    facts = sources.identify(name)
    if name.endswith(_LINES):
        return Source(name, facts, lambda _state: _line_batches(path))
    if name.endswith(_TEXT):
        return Source(name, facts, lambda _state: _group_documents(name, _text_documents(path, how.documents_by)))
    if name.endswith(".parquet"):
        columns = partial(_require_column, where=name, field=how.field)
        return Source(
            name, facts, lambda _state: _group_documents(name, _rows(sources.parquet_rows(path, columns), how.field))
        )
    if name.endswith((".json", ".json.gz")):
        return Source(name, facts, lambda _state: _group_documents(name, _rows(json_stream.records(path), how.field)))
    kinds = ", ".join((*_LINES, *_TEXT, ".json", ".json.gz", ".parquet"))
    raise DataError(f"{name}: unknown file type. Expected a name that ends with one of {kinds}.")


def _rows(records: Iterable[tuple[str, dict[str, Any]]], field: str) -> Iterator[tuple[str, str]]:
    for where, row in records:
        yield where, text_of(row, field, where)


def _group_documents(
    source: str, documents: Iterable[tuple[str, str]], state: Callable[[], Any] = lambda: None
) -> Iterator[Batch]:
    """Group documents into batches. state: returns the state after the last document that was read."""
    batch, size = [], 0
    for where, text in documents:
        batch.append((where, text))
        size += len(text)
        if len(batch) == sources.BATCH_ROWS or size >= _BATCH_BYTES:
            yield Batch(source, texts=batch, state=state())
            batch, size = [], 0
    if batch:
        yield Batch(source, texts=batch)


def _lines(path: Path) -> Iterator[bytes]:
    with json_stream.open_bytes(path, packed=path.suffix == ".gz") as file:
        yield from file


def _line_batches(path: Path) -> Iterator[Batch]:
    batch, size, first = [], 0, 1
    for number, line in enumerate(_lines(path), 1):
        batch.append(line)
        size += len(line)
        if len(batch) == sources.BATCH_ROWS or size >= _BATCH_BYTES:
            yield Batch(str(path), batch, first)
            batch, size, first = [], 0, number + 1
    if batch:
        yield Batch(str(path), batch, first)


def _text_documents(path: Path, by: DocumentsBy) -> Iterator[tuple[str, str]]:
    """Lines without their line ends; paragraphs and files unchanged, except line ends and outer blank lines."""
    parts: list[str] = []
    first = 0
    for number, raw in enumerate(_lines(path), 1):
        try:
            line = raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode()
        except UnicodeDecodeError as bad:
            raise DataError(
                f"{path}:{number}: not UTF-8 text: {bad.reason} at byte {bad.start}. Convert the file to UTF-8."
            ) from None
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


def _table(name: str, rows: Any, how: Reading) -> Source:
    """Source for the rows of a `datasets` data set on the disk."""

    def read(_state: Any) -> Iterator[Batch]:
        numbered_rows = (
            (f"{name}: row {number}", row) for number, row in enumerate(rows.select_columns([how.field]), 1)
        )
        return _group_documents(name, _rows(numbered_rows, how.field))

    return Source(name, sources.identify(name, rows), read)


def _require_column(columns: list[str], where: str, field: str) -> list[str]:
    """Return [field]; raise DataError if it is not in `columns`."""
    if field not in columns:
        raise DataError(
            f"{where}: column {field!r} is missing.{nearest_text([field], columns)} Columns: {', '.join(columns)}. "
            "Choose one with --text_field."
        )
    return [field]


def _stream(name: str, split: str, rows: Any, how: Reading) -> Source:
    """Source for a hub data set that is read over the network."""
    builder = sources.call_datasets(name, lambda datasets: datasets.load_dataset_builder(*sources.hub_id(name)[:2]))
    facts = {"name": name, "split": split, "version": str(builder.info.version), "hash": builder.hash}
    return Source(name, facts, lambda state: _stream_rows(rows.select_columns([how.field]), name, how.field, state))


def _stream_rows(rows: Any, name: str, field: str, state: dict[str, Any] | None) -> Iterator[Batch]:
    """Yield batches of rows read over the network. Files read before `state` are not downloaded again."""
    if state is not None:
        rows.load_state_dict(state["rows"])
    count = state["count"] if state is not None else 0

    def with_places() -> Iterator[tuple[str, dict[str, Any]]]:
        nonlocal count
        for row in rows:
            count += 1
            yield f"{name}: row {count}", row

    yield from _group_documents(name, _rows(with_places(), field), lambda: {"rows": rows.state_dict(), "count": count})
