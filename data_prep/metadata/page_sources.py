"""Read pages and annotated documents as rows, one at a time: WARC, Parquet and JSON lines, plain or with gzip."""

import glob
import gzip
import logging
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import sources
from data_prep.crossattn.qa_releases import json_stream
from data_prep.metadata.html import LONGEST_PAGE
from src.errors import DataError
from src.files import reading

Row = dict[str, Any]
HTML = "doc_html"
"""The field of a page's HTML: text, bytes or `RawPage`."""
KINDS = (".warc", ".warc.gz", ".parquet", ".jsonl", ".jsonl.gz")
PACKAGES = "requirements/metadata.txt"
RECORDS = ("2xx", "3xx", "4xx", "5xx", "resource")
"""Kinds of WARC records that can be pages: responses by their HTTP status, and resources, which have no status."""

SHORT_RECORD = "lines after the end of a record, whose Content-Length is too small"
"""Key of a count."""
log = logging.getLogger(__name__)

_COMPRESSED_PREFIXES = (b"\x1f\x8b", b"\x78\x01", b"\x78\x9c", b"\x78\xda")
"""First bytes of gzip and zlib. warcio returns a body that it cannot decompress unchanged."""


class RawPage(NamedTuple):
    """A page as sent by the server."""

    data: bytes
    content_type: str
    """Value of the HTTP header."""
    is_truncated: bool = False
    """Whether the crawler or the server stopped before its end."""


def list_files(names: Sequence[str]) -> list[Path]:
    """List the files that names, folders and patterns refer to, sorted within each.

    Raises:
        DataError: a name matches no file, or no file of a readable kind, or a folder or a broken link with such a name.
    """
    files = list[Path]()
    for name in names:
        path = Path(name)
        paths = (
            sorted(path.iterdir())
            if path.is_dir()
            else [path]
            if path.is_file()
            else [Path(each) for each in sorted(glob.glob(name))]
        )
        readable = [each for each in paths if each.name.endswith(KINDS)]
        if others := [each for each in paths if each not in readable]:
            some = ", ".join(each.name for each in others[:3])
            log.warning("%s: %d files or folders of other kinds are not read, such as %s", name, len(others), some)
        if not readable:
            raise DataError(
                f"{name}: {'no readable file' if paths else 'no such file'}. Expected names that end with "
                f"{', '.join(KINDS)}."
            )
        for each in readable:
            if not each.is_file():
                raise DataError(f"{each}: not a file. Move it away; name a folder of files as a source of its own.")
        files += readable
    return files


def read_rows(
    path: Path, counts: Counter[str] | None = None, records: Collection[str] = RECORDS[:1]
) -> Iterator[tuple[str, Row]]:
    """Yield ("FILE:LINE" or similar, row) for each row or page of a file.

    counts: incremented for each WARC record that is skipped, by its kind. records: the kinds of `RECORDS` to read.

    Raises:
        DataError: the file is truncated or damaged, or a line is not a JSON object; the message has the place.
    """
    if path.name.endswith((".warc", ".warc.gz")):
        return _warc_pages(path, Counter() if counts is None else counts, records)
    if path.suffix == ".parquet":
        return sources.parquet_rows(path, list)
    return json_stream.lines(path)


def _warc_pages(path: Path, counts: Counter[str], kinds: Collection[str]) -> Iterator[tuple[str, Row]]:
    """Yield the HTML pages of a WARC file with their addresses."""
    try:
        import webencodings  # noqa: F401  for the charset of the pages
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: reading WARC needs a package that is not installed: pip install -r {PACKAGES}"
        ) from None

    class Records(ArchiveIterator):
        """Raises an error where the file ends within the headers of a record, which warcio takes for its end."""

        INC_RECORD = ""  # it prints the bytes between two records

        def _next_record(self, next_line: bytes | None) -> Any:
            try:
                return super()._next_record(next_line)
            except EOFError:
                if next_line or (number == 0 and stream.has_content):
                    raise ArchiveLoadFailed("it ends within the headers of a record") from None
                raise

    number = 0
    try:
        with reading(path, DataError), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            stream = _Gzip(file)
            records = Records(stream)
            for number, record in enumerate(records, 1):
                if record.format == "arc":
                    raise DataError(f"{path}: an ARC file. Convert it to WARC: warcio recompress {path} NAME.warc.gz")
                if not (record.rec_headers.get_header("Content-Length") or "").isdigit():
                    raise ArchiveLoadFailed("it has no Content-Length")
                _normalise_codings(record)
                reason = _reason_to_skip(record, kinds)
                page = None if reason else _read_page(record)
                if page is not None and (reason := _undecodable(record, page.data)):
                    page = None
                if page is None:
                    counts[reason] += 1
                else:
                    yield (
                        f"{path}: record {number}",
                        {"url": record.rec_headers.get_header("WARC-Target-URI"), HTML: page},
                    )
                while record.raw_stream.read(1 << 20):
                    pass
                if getattr(record.raw_stream, "limit", 0):
                    raise zlib.error("it ends within a record")
            if records.err_count:
                counts[SHORT_RECORD] += records.err_count
    except AttributeError:  # warcio needs the address
        raise DataError(
            f"{path}: record {number + 1}: a response without WARC-Target-URI. Download the file again."
        ) from None
    except (ArchiveLoadFailed, zlib.error, gzip.BadGzipFile) as bad:
        why = sources.first_line(bad).rstrip(".")
        raise DataError(
            f"{path}: record {max(number, 1)} or the next: truncated or damaged ({why}). Download it again."
        ) from None


def _read_page(record: Any) -> RawPage:
    stream, chunks = record.content_stream(), None
    if hasattr(stream, "all_chunks_read"):
        stream.stream = chunks = _Chunks(stream.stream)
    data = stream.read(LONGEST_PAGE + 1)
    while len(data) <= LONGEST_PAGE and _remainder(stream).startswith(_COMPRESSED_PREFIXES[0]):  # more members of gzip
        stream.read_next_member()
        data += stream.read(LONGEST_PAGE + 1 - len(data))
    is_truncated = bool(record.rec_headers.get_header("WARC-Truncated"))
    if len(data) <= LONGEST_PAGE:  # it was read to its end
        is_truncated |= chunks is not None and (chunks.is_cut or (stream.all_chunks_read and not chunks.last))
        decompressor = getattr(stream, "decompressor", None)
        finished = getattr(decompressor, "is_finished", None)  # of brotli; the others have `eof`
        is_truncated |= not (finished() if finished else getattr(decompressor, "eof", True))
    return RawPage(data, _type(record), is_truncated)


def _remainder(stream: Any) -> bytes:
    return getattr(getattr(stream, "decompressor", None), "unused_data", b"")


def _type(record: Any) -> str:
    """Content type of a record: of the HTTP response or the resource, else as identified by the crawler."""
    headers = record.rec_headers if record.rec_type == "resource" else record.http_headers
    return headers.get_header("Content-Type") or record.rec_headers.get_header("WARC-Identified-Payload-Type") or ""


def _reason_to_skip(record: Any, kinds: Collection[str]) -> str:
    """Kind of a record that is skipped; "" for a page to read."""
    if record.rec_type == "resource":
        kind = name = "resource"
    elif record.rec_type == "response" and record.http_headers:
        status = record.http_headers.get_statuscode()
        is_status = len(status) == 3 and status.isdigit()
        kind, name = f"{status[:1]}xx" if is_status else "", f"response {status if is_status else 'without status'}"
    else:
        return (
            "response without HTTP" if record.rec_type == "response" else record.rec_type or "record without WARC-Type"
        )
    if kind not in kinds:
        return name
    return "" if "html" in _type(record).partition(";")[0].lower() else f"{name} that is not HTML"


def _normalise_codings(record: Any) -> None:
    """Normalize the names of codings to the spelling that warcio compares."""
    for header, alias, name in (("Transfer-Encoding", "chunked", "chunked"), ("Content-Encoding", "x-gzip", "gzip")):
        value = record.http_headers and record.http_headers.get_header(header)
        if value:
            coding = value.strip().lower()
            record.http_headers.replace_header(header, name if coding == alias else coding)


def _undecodable(record: Any, page: bytes) -> str:
    """Why the body of a response is still encoded; "" if it is readable."""
    from warcio.bufferedreaders import BufferedReader

    encoding = record.http_headers.get_header("Content-Encoding") or "" if record.http_headers else ""
    transfer = record.http_headers.get_header("Transfer-Encoding") or "" if record.http_headers else ""
    if transfer not in ("", "identity", "chunked"):
        return f"response with transfer encoding {transfer}"
    if page[:2] in _COMPRESSED_PREFIXES:
        return "response with a damaged compressed body"
    if encoding in ("", "identity", *BufferedReader.get_supported_decompressors()) or page.lstrip()[:1] == b"<":
        return ""
    return f"response with content encoding {encoding}"


class _Chunks:
    """Body of a response in chunks."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._lines = stream, 0
        self.is_cut = False
        """Whether it ended where the length of a chunk was expected."""
        self.last = b""
        """What was read last. It is empty at the end of the body."""

    def read(self, size: int) -> bytes:
        self.last = self._stream.read(size)
        return self.last

    def readline(self, size: int) -> bytes:
        line = self._stream.readline(size)
        self.is_cut |= self._lines > 0 and not line.endswith(b"\n")  # the first line of a body without chunks is text
        self._lines += 1
        return line


class _Gzip:
    """File that raises an error if it ends within a gzip stream. warcio takes EOFError for the end of records."""

    def __init__(self, file: Any) -> None:
        self._file, self.has_content = file, False

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError as bad:
            raise zlib.error(str(bad)) from None
        self.has_content |= bool(data)
        return data
