"""Pages and annotated documents as rows, one after another and never a file at once: WARC, parquet, and JSON a line, plain or with gzip."""

import glob
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep import sources
from data_prep.metadata.html import LONGEST_PAGE
from src.data import jsonl
from src.errors import DataError
from src.files import reading

Row = dict[str, Any]
HTML = "doc_html"
"""The field of a page's HTML."""
KINDS = (".warc", ".warc.gz", ".parquet", ".jsonl", ".jsonl.gz")
PACKAGES = "requirements/metadata.txt"
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([\w-]{1,40})""", re.IGNORECASE)


def list_files(names: Sequence[str]) -> list[Path]:
    """The files that are given by name, as folders or as patterns, sorted within each.

    Raises:
        DataError: there is none of a name, or its ending is unknown.
    """
    found = list[Path]()
    for name in names:
        path = Path(name)
        paths = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else [Path(each) for each in sorted(glob.glob(name))]
        own = [each for each in paths if each.name.endswith(KINDS)]
        if not own:
            raise DataError(f"{name}: {'no file here ends' if paths else 'no such file. Expected names that end'} with {', '.join(KINDS)}.")
        found += own
    return found


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """("FILE:LINE" or the like, row) of a file.

    Raises:
        DataError: it is cut or damaged, or a line is no JSON object; names the place.
    """
    if path.name.endswith((".warc", ".warc.gz")):
        return _warc_pages(path)
    if path.suffix == ".parquet":
        return sources.parquet_rows(path, list)
    return _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with reading(path, DataError), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", jsonl.parse(line, f"{path}:{number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as bad:
        raise DataError(
            f"{path}:{number + 1}: the file is cut or damaged here ({sources.first_line(bad).rstrip('.')}). Get it again."
        ) from None


def _warc_pages(path: Path) -> Iterator[tuple[str, Row]]:
    """The responses that are HTML, with their addresses."""
    try:
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ModuleNotFoundError:
        raise DataError(f"{path}: a package that reads WARC is not installed: pip install -r {PACKAGES}") from None
    number = 0
    try:
        with reading(path, DataError), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, record in enumerate(ArchiveIterator(_Whole(file)), 1):
                kind = record.http_headers.get_header("Content-Type", "") if record.http_headers else ""
                if record.rec_type == "response" and "html" in kind:
                    raw = record.content_stream().read(LONGEST_PAGE + 1)
                    yield f"{path}: record {number}", {"url": record.rec_headers.get_header("WARC-Target-URI"), HTML: _decode(raw, kind)}
                while record.raw_stream.read(1 << 20):
                    pass
                if getattr(record.raw_stream, "limit", 0):
                    raise zlib.error("it ends within a record")
    except (ArchiveLoadFailed, zlib.error, gzip.BadGzipFile) as bad:
        why = sources.first_line(bad).rstrip(".")
        raise DataError(f"{path}: record {max(number, 1)} or the next: cut or damaged ({why}). Get it again.") from None


class _Whole:
    """A file whose end within a gzip stream is an error: warcio takes any EOFError for the end of the records."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except EOFError as bad:
            raise zlib.error(str(bad)) from None


def _decode(page: bytes, content_type: str) -> str:
    """By the character set of the header, of the page itself, or UTF-8. One that is too long stays so: a character for each byte."""
    if len(page) > LONGEST_PAGE:
        return page.decode("latin-1")
    named = re.search(r"charset=[\"']?([\w-]+)", content_type)
    inside = _CHARSET.search(page[:4096])
    for name in (named and named[1], inside and inside[1].decode()):
        try:
            return page.decode(name or "utf-8", "replace")
        except (LookupError, UnicodeError):  # of no character set, or of one that refuses, such as "undefined"
            continue
    return page.decode("utf-8", "replace")
