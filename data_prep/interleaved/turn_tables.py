"""Read conversations about images in Parquet files, in the layout of FineVision and the_cauldron.

Column "images" has lists of {"bytes", "path"}, column "texts" lists of {"user", "assistant"}. An image without bytes is
read from its path in the folder of images, if one is given.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import sources
from data_prep.interleaved.rows import ReaderOptions, Row, make_turns, read_image
from src.data import jsonl
from src.errors import DataError

COLUMNS = ("images", "texts")
_AT_ONCE = 16
"""Rows in memory at a time."""


def read_turns(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Yield a document for each row of the file.

    Raises:
        DataError: the file is not Parquet, a column is missing, or a row has another layout.
    """
    for number, (where, row) in enumerate(sources.parquet_rows(path, lambda names: _require(path, names), _AT_ONCE)):
        yield _row(f"{number:08}", row, options, where)


def _require(path: Path, names: list[str]) -> list[str]:
    if missing := [name for name in COLUMNS if name not in names]:
        raise DataError(
            f"{path}: column {missing[0]!r} is missing. Columns: {', '.join(names)}. Choose the layout of this file."
        )
    return [*COLUMNS]


def _row(key: str, row: dict[str, Any], options: ReaderOptions, where: str) -> Row:
    images, turns = list[bytes](), list[tuple[str, str]]()
    jsonl.check_type(row["texts"], list[dict], f"{where}: texts")
    for number, turn in enumerate(row["texts"]):
        for name in ("user", "assistant"):
            jsonl.check_type(turn.get(name), str, f"{where}: texts[{number}].{name}")
        turns.append((turn["user"], turn["assistant"]))
    jsonl.check_type([] if row["images"] is None else row["images"], list[dict], f"{where}: images")
    for number, image in enumerate(row["images"] or ()):
        content, name = image.get("bytes"), image.get("path")
        if not content and name and options.images:
            content = read_image(name, options, f"{where}: images[{number}]")
        images.append(content or b"")
    return make_turns(key, images, turns, options)
