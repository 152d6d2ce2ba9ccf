"""The work on one file of pages: what extractors find becomes columns of its rows, and a file beside, which is whole or not there."""

import glob
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from data_prep import sources
from data_prep.metadata import description, entities, html, page_sources, text, url
from src.data.metadata.annotations import PREFIX, read_row
from src.errors import DataError, UserError
from src.files import read_json, write_atomic, write_json, writing

Row = dict[str, Any]
DIGEST = struct.Struct("16sQ")
"""Of a document: a digest of its text, and its place among the rows of the source."""
ROWS = "rows"
"""Under this name those are counted that are no rows with metadata, and left out."""
_SHOWN = 3
"""Errors that are shown of a file."""


@dataclass(frozen=True)
class Options:
    """What is extracted of rows."""

    extract: tuple[str, ...] = ()
    compatible: bool = False
    """With the faults of the original."""
    wiki_index: str = ""
    """Path of the index of Wikipedia, for descriptions."""
    mentions: str = ""
    """Path of a dictionary of entities."""


def _from_html(row: Row, options: Options) -> Row:
    page = row.get(page_sources.HTML)
    if not isinstance(page, str):
        raise DataError(f"field {page_sources.HTML!r}: expected the HTML of a page, got {page!r}.")
    columns = html.extract(page).columns()
    del row[page_sources.HTML]  # what failed keeps what it had
    return columns


def _describe(row: Row, options: Options) -> Row:
    return description.extract(row, description.open_descriptions(options.wiki_index), options.compatible)


class Extractor(NamedTuple):
    """How columns are made of a row."""

    name: str
    """In the columns that tell of its errors."""
    columns: tuple[str, ...]
    """That it makes; of a row that it fails on those of metadata are empty, unless they are there."""
    extract: Callable[[Row, Options], Mapping[str, Any]]


EXTRACTORS: dict[str, Extractor] = {
    "html": Extractor("HtmlPreprocessor", html.COLUMNS, _from_html),
    "url": Extractor("UrlPreprocessor", url.COLUMNS, lambda row, options: url.extract(row, options.compatible)),
    "description": Extractor("WebsiteDescPreprocessor", description.COLUMNS, _describe),
    "entities": Extractor(
        "EntityPreprocessor", entities.COLUMNS, lambda row, options: entities.extract(row, entities.read_linker(options.mentions))
    ),
    "text": Extractor("TextPreprocessor", text.COLUMNS, lambda row, options: text.extract(row, options.compatible)),
}
"""In the order in which they are called: later ones read what earlier ones found."""


@dataclass(frozen=True)
class Part:
    """The rows of one source: NAME.jsonl, NAME.digests and, written last, NAME.json."""

    source: Path
    stem: Path

    @property
    def report(self) -> Path:
        """What is told of them; its presence says that they are whole."""
        return self.stem.with_suffix(".json")

    @property
    def rows(self) -> Path:
        """One JSON object a line."""
        return self.stem.with_suffix(".jsonl")

    @property
    def digests(self) -> Path:
        """A DIGEST of each row."""
        return self.stem.with_suffix(".digests")

    def is_settled(self) -> bool:
        """Whether they are whole, or it was told why they cannot be."""
        return self.report.exists() or self.failure.exists()

    def leftovers(self) -> list[Path]:
        """Files that are being written, or were by a process that was killed."""
        return [path for name in (self.rows, self.digests) for path in name.parent.glob(f".{glob.escape(name.name)}.*")]

    @property
    def failure(self) -> Path:
        """Why the source could not be read, of the last trial."""
        return self.stem.with_suffix(".failed")


def part_of(source: Path, facts: Mapping[str, Any], options: Options, folder: Path) -> Part:
    """Its name depends on the source's facts and on the options, so that nothing else is ever taken for it."""
    key = hashlib.sha256(orjson.dumps([facts, asdict(options)])).hexdigest()[:16]
    return Part(source, folder / f"{source.name.partition('.')[0][:40]}-{key}")


def make_part(part: Part, options: Options) -> None:
    """Make the part, if it is not there. What is wrong with the source is kept in `part.failure`, so that other parts are made."""
    if part.report.exists():
        return
    part.failure.unlink(missing_ok=True)
    try:
        _write_part(part, options)
    except UserError as error:
        write_atomic(part.failure, str(error))
    except Exception as error:  # noqa: BLE001  datatrove would start no other task
        write_atomic(part.failure, f"{part.source}: {type(error).__name__}: {sources.first_line(error)}")


def _write_part(part: Part, options: Options) -> None:
    report: dict[str, Any] = {"rows": 0, "empty": 0, "columns": [], "errors": {name: [0, []] for name in (*options.extract, ROWS)}}
    columns = dict[str, None]()
    names = part.rows, part.digests
    beside = [path.with_name(f".{path.name}.{os.getpid()}") for path in names]  # another process may do the same
    with writing(part.stem), open(beside[0], "wb") as rows, open(beside[1], "wb") as digests:
        for number, (where, row) in enumerate(page_sources.read_rows(part.source), 1):
            made = _annotate(row, where, options, report["errors"])
            if not made.get("text", "html" not in options.extract):  # where nothing makes it, a row without the field is an error
                report["empty"] += 1
                continue
            try:
                read_row(made, where)
            except DataError as error:
                _count_error(report["errors"][ROWS], str(error))
                continue
            columns |= dict.fromkeys(name for name in made if name.startswith(PREFIX))
            try:
                rows.write(orjson.dumps(made) + b"\n")
            except orjson.JSONEncodeError as error:
                raise DataError(f"{where}: cannot be written as JSON ({error}).") from None
            digests.write(DIGEST.pack(hashlib.sha256(made["text"].encode()).digest()[:16], number))
            report["rows"] += 1
        for file in (rows, digests):
            file.flush()
            os.fsync(file.fileno())
    report["columns"] = list(columns)
    for path, name in zip(beside, names, strict=True):
        path.replace(name)
    write_json(part.report, report)


def _annotate(row: Row, where: str, options: Options, errors: dict[str, list[Any]]) -> Row:
    for name in options.extract:
        extractor = EXTRACTORS[name]
        comment = ""
        try:
            row |= extractor.extract(row, options)
        except Exception as error:  # noqa: BLE001  as BigScience's: one page must not end all; they are counted, shown and limited
            comment = " ".join(f"{'' if isinstance(error, DataError) else f'{type(error).__name__}: '}{error}".split())
            _count_error(errors[name], f"{where}: {comment}")
            row = {**{column: [] for column in extractor.columns if column.startswith(PREFIX)}, **row}
        row |= {f"{extractor.name}_error": int(bool(comment)), f"{extractor.name}_error_comment": comment}
    return row


def _count_error(found: list[Any], text: str) -> None:
    found[0] += 1
    found[1] = [*found[1], text][:_SHOWN]


def read_report(part: Part) -> dict[str, Any]:
    """What `make_part` told of a part that is whole."""
    return read_json(part.report, DataError)


def digests_of(part: Part) -> Iterator[tuple[bytes, int]]:
    """(Digest of its text, number in the source) of each row."""
    with open(part.digests, "rb") as file:
        while block := file.read(DIGEST.size * 4096):
            yield from DIGEST.iter_unpack(block)
