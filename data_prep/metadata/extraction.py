"""Extract metadata from a file of pages. Writes the rows and a digest of each row, atomically."""

import contextlib
import hashlib
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from data_prep import sources
from data_prep.metadata import charset, description, entities, html, page_sources, text, url
from src.errors import DataError, UserError
from src.files import encodable, read_json, write_atomic, write_json, writing
from src.systems.metadata.data.annotations import PREFIX, compact_item, read_row

Row = dict[str, Any]
DIGEST = struct.Struct("16sQ")
"""Digest of a document's text, and the number of its row in the source."""
ROWS = "rows"
"""Name of the count of malformed rows, which are dropped."""
TOO_SLOW = "pages over --page_seconds"
_MAX_LOGGED = 3
"""Maximum number of errors logged per file."""
_GRACE = 1.0
"""Seconds of processor time until a second signal, in case the first one was caught."""


@dataclass(frozen=True)
class Options:
    """Extractors and their settings."""

    extract: tuple[str, ...] = ()
    compatible: bool = False
    """Whether to reproduce the faults of the reference."""
    wiki_index: str = ""
    """Path of the Wikipedia index for descriptions."""
    mentions: str = ""
    """Path of a dictionary of entities."""
    removal: tuple[html.RemovalRule, ...] = ()
    """Rules for removing elements from pages."""
    records: tuple[str, ...] = page_sources.RECORDS[:1]
    """Kinds of WARC records that are read."""
    page_seconds: float = 10.0
    """Limit of processor time per page."""


class PageTimeout(BaseException):  # a library that catches Exception must not swallow it
    """A page took too much processor time."""


@contextlib.contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Limit the processor time of a block; works in the main thread of a process.

    Raises:
        PageTimeout: the block took longer. Code in C is interrupted when it returns to Python.
    """

    def stop(*_: object) -> None:
        raise PageTimeout

    before = signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, _GRACE)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _from_html(row: Row, options: Options) -> Row:
    page = row.get(page_sources.HTML)
    if not isinstance(page, str):
        raise DataError(f"field {page_sources.HTML!r}: expected the HTML of a page, got {page!r:.60}.")
    is_empty = html.BLANK_PAGE.fullmatch(page) and not row.get("text")
    columns = (html.Page("", [], [], [], []) if is_empty else html.extract(page, options.removal)).columns()
    del row[page_sources.HTML]  # only now, so that the row still has it after a failure
    return columns


class Extractor(NamedTuple):
    """A function that makes columns of a row."""

    name: str
    """Prefix of its error columns."""
    columns: tuple[str, ...]
    """Columns that it makes. After a failure, metadata columns missing from the row are empty."""
    extract: Callable[[Row, Options], Mapping[str, Any]]


EXTRACTORS: dict[str, Extractor] = {
    "html": Extractor("HtmlPreprocessor", html.COLUMNS, _from_html),
    "url": Extractor("UrlPreprocessor", url.COLUMNS, lambda row, options: url.extract(row, options.compatible)),
    "description": Extractor(
        "WebsiteDescPreprocessor",
        description.COLUMNS,
        lambda row, options: description.extract(
            row, description.open_descriptions(options.wiki_index), options.compatible
        ),
    ),
    "entities": Extractor(
        "EntityPreprocessor",
        entities.COLUMNS,
        lambda row, options: entities.extract(row, entities.read_linker(options.mentions)),
    ),
    "text": Extractor("TextPreprocessor", text.COLUMNS, lambda row, options: text.extract(row, options.compatible)),
}
"""Extractors in calling order; later ones read the columns of earlier ones."""


@dataclass(frozen=True)
class Part:
    """The rows of one source: NAME.jsonl, NAME.digests and, written last, NAME.json."""

    source: Path
    stem: Path

    @property
    def report(self) -> Path:
        """File with counts and errors; exists once the part is complete."""
        return self.stem.with_suffix(".json")

    @property
    def rows(self) -> Path:
        """File with one JSON object per line."""
        return self.stem.with_suffix(".jsonl")

    @property
    def digests(self) -> Path:
        """File with one DIGEST per row."""
        return self.stem.with_suffix(".digests")

    @property
    def failure(self) -> Path:
        """File with the error of the last attempt."""
        return self.stem.with_suffix(".failed")


def part_of(source: Path, facts: Mapping[str, Any], options: Options, folder: Path) -> Part:
    """Name a part after the facts of its source and the options, so that other options have another part."""
    settings = {**asdict(options), "removal": [rule.model_dump() for rule in options.removal]}
    key = hashlib.sha256(orjson.dumps([facts, settings])).hexdigest()[:16]
    return Part(source, folder / f"{source.name.partition('.')[0][:40]}-{key}")


def make_part(part: Part, options: Options) -> None:
    """Make a part if it is missing. Errors are saved in `part.failure`, so that the other parts are still made."""
    if part.report.exists():
        return
    part.failure.unlink(missing_ok=True)
    try:
        _write_part(part, options)
    except UserError as error:
        write_atomic(part.failure, encodable(str(error)))
    except Exception as error:  # noqa: BLE001  datatrove would stop the remaining tasks
        text = f"{part.source}: {type(error).__name__}: {sources.first_line(error)}"
        write_atomic(part.failure, encodable(text))


def _write_part(part: Part, options: Options) -> None:
    errors: dict[str, list[Any]] = {name: [0, []] for name in (*options.extract, ROWS)}
    report: dict[str, Any] = {"rows": 0, "empty": 0, "columns": [], "errors": errors}
    skipped, pages, columns, replaced_pages = Counter[str](), Counter[str](), dict[str, None](), list[str]()
    names = part.rows, part.digests
    temporary = [
        path.with_name(f".{path.name}.{os.getpid()}") for path in names
    ]  # another process can write the same part
    with writing(part.stem), open(temporary[0], "wb") as rows, open(temporary[1], "wb") as digests:
        for number, (where, row) in enumerate(page_sources.read_rows(part.source, skipped, options.records), 1):
            try:
                with processor_limit(options.page_seconds):
                    annotated_row = _annotate(_decode_page(row, where, pages, replaced_pages), where, options, errors)
                    if annotated_row.get(
                        "text", "html" not in options.extract
                    ):  # without an extractor of text, a missing text is an error
                        read_row(annotated_row, where)
                    else:
                        report["empty"] += 1
                        continue
            except PageTimeout:
                skipped[TOO_SLOW] += 1
                continue
            except DataError as error:
                _count_error(errors[ROWS], str(error))
                continue
            columns |= dict.fromkeys(name for name in annotated_row if name.startswith(PREFIX))
            try:
                rows.write(
                    orjson.dumps(annotated_row if options.compatible else _compact(annotated_row, options)) + b"\n"
                )
            except orjson.JSONEncodeError as error:
                raise DataError(f"{where}: cannot be written as JSON ({error}). Remove or convert the field.") from None
            digests.write(DIGEST.pack(hashlib.sha256(annotated_row["text"].encode()).digest()[:16], number))
            report["rows"] += 1
        for file in (rows, digests):
            file.flush()
            os.fsync(file.fileno())
    report |= {"columns": list(columns), "skipped": dict(skipped), "pages": dict(pages), "replaced": replaced_pages}
    for path, name in zip(temporary, names, strict=True):
        path.replace(name)
    write_json(part.report, report)


def _decode_page(row: Row, where: str, pages: Counter[str], replaced_pages: list[str]) -> Row:
    """Return the row with its page as text.

    pages: counts all pages, pages with a guessed charset, truncated pages, and pages with replacement characters.
    replaced_pages: places of the first pages with replacement characters.
    """
    page = row.get(page_sources.HTML)
    if isinstance(page, page_sources.RawPage | bytes):
        raw = page if isinstance(page, page_sources.RawPage) else page_sources.RawPage(page, "")
        if len(raw.data) > html.LONGEST_PAGE:  # too long for the extractor in any charset: one character per byte
            decoded = charset.Decoded(raw.data.decode("latin-1"), charset.FALLBACK, False)
        else:
            decoded = charset.decode(raw.data, raw.content_type)
        page, row = decoded.text, {**row, page_sources.HTML: decoded.text}
        pages["guessed"] += decoded.is_guess
        pages["truncated"] += raw.is_truncated
    if isinstance(page, str):
        pages["all"] += 1
        if charset.REPLACEMENT in page:
            pages["replaced"] += 1
            replaced_pages[:] = [*replaced_pages, where][:_MAX_LOGGED]
    return row


def _compact(row: Row, options: Options) -> Row:
    """Drop fields of extracted items that a reader can derive from the text."""
    names = {name for key in options.extract for name in EXTRACTORS[key].columns if name.startswith(PREFIX)}
    return {
        name: [compact_item(name.removeprefix(PREFIX), item, row["text"]) for item in value]
        if name in names and value
        else value
        for name, value in row.items()
    }


def _annotate(row: Row, where: str, options: Options, errors: dict[str, list[Any]]) -> Row:
    for name in options.extract:
        extractor = EXTRACTORS[name]
        comment = ""
        try:
            row |= extractor.extract(row, options)
        except Exception as error:  # noqa: BLE001  like the reference: one page must not stop the run; errors are counted and limited
            comment = " ".join(f"{'' if isinstance(error, DataError) else f'{type(error).__name__}: '}{error}".split())
            _count_error(errors[name], f"{where}: {comment}")
            row = {**{column: [] for column in extractor.columns if column.startswith(PREFIX)}, **row}
        row |= {f"{extractor.name}_error": int(bool(comment)), f"{extractor.name}_error_comment": comment}
    return row


def _count_error(count_and_examples: list[Any], text: str) -> None:
    count_and_examples[0] += 1
    count_and_examples[1] = [*count_and_examples[1], text][:_MAX_LOGGED]


def read_report(part: Part) -> dict[str, Any]:
    """Read the report of a complete part."""
    return read_json(part.report, DataError)


def digests_of(part: Part) -> Iterator[tuple[bytes, int]]:
    """Yield (digest of the text, number in the source) for each row."""
    with open(part.digests, "rb") as file:
        while block := file.read(DIGEST.size * 4096):
            yield from DIGEST.iter_unpack(block)
