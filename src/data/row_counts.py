"""Rows of prepared data before a start, without a tokenizer: their fields, and limits of an experiment on their number.

No more of a file is read than a check needs.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from src.data import jsonl
from src.errors import DataError
from src.files import reading

Row = dict[str, Any]


def iterate(
    path: Path,
    fields: Mapping[str, Any],
    optional: Mapping[str, Any] | None = None,
    check: Callable[[Row, str], object] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a JSONL file. Arguments: see `jsonl.read_rows`.

    Raises:
        DataError: a row is malformed.
    """
    with reading(path, DataError), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            row = jsonl.parse(line, where)
            jsonl.check_fields(row, fields, optional or {}, where)
            if check is not None:
                check(row, where)
            yield row


def count_lines(path: Path, most: int) -> int:
    """Number of lines of a file, at most `most`."""
    with reading(path, DataError), open(path, "rb") as file:
        return sum(1 for _ in islice(file, most))


def require(field: str, requested: int | None, available: int) -> None:
    """Raise DataError if `field` requests more than there is. requested: None for all."""
    if requested is not None and requested > available:
        raise DataError(f"{field}: {requested} requested, only {available} available. Use fewer.")


def require_lines(field: str, requested: int | None, path: Path) -> None:
    """Raise DataError if `field` requests more rows than a file has. requested: None for all."""
    if requested is not None:
        require(field, requested, count_lines(path, requested))
