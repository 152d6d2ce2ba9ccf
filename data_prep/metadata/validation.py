"""Make a validation set per type of metadata: `python -m data_prep.metadata.validation c4_html --columns html title`.

Writes a folder CORPUS-validation_metadata_COLUMN per type next to a prepared corpus, named like the published ones.
Its validation split has the rows with this type, without the other types. The training split is that of the corpus.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from data_prep import command
from data_prep.crossattn.qa_releases import json_stream
from src.data import jsonl
from src.errors import ConfigError, DataError
from src.experiments.config import unknown_text
from src.files import read_manifest
from src.support.command_line import require_at_least
from src.systems.metadata.data.annotations import COLUMNS, PREFIX

COMMAND = "python -m data_prep.metadata.validation"


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    parser.add_argument("corpus", help="name of the prepared folder below it")
    parser.add_argument("--columns", nargs="+", required=True, metavar="COLUMN", help=f"of: {', '.join(COLUMNS)}")
    parser.add_argument("--most", type=int, metavar="N", help="rows of each set, the first ones (default: all)")


def make_sets(data_path: Path, corpus: str, columns: Sequence[str], most: int | None = None) -> None:
    """Make the folders of all columns, after checking that each has rows.

    Raises:
        DataError: the corpus is not prepared, or has no row with a column.
        ConfigError: a column is unknown.
    """
    require_at_least(1, most=most)
    folder = data_path / corpus
    source = jsonl.require_file(folder, "val.jsonl")
    for column in columns:
        if column not in COLUMNS:
            raise ConfigError(f"--columns: {unknown_text('column', column, COLUMNS)}")
        if not any(True for _ in rows_with(source, column)):
            raise DataError(f"--columns: no row of {source} has {column!r}. Remove it from --columns.")
    files = read_manifest(folder, DataError)["files"]
    for column in columns:
        made_from = {
            "corpus": {name: files[name]["sha256"] for name in ("train.jsonl", "val.jsonl")},
            "column": column,
            "most": most,
        }

        def fill(new: Path, column: str = column) -> dict[str, Any]:
            _share(folder / "train.jsonl", new / "train.jsonl")
            with open(new / "val.jsonl", "wb") as file:
                rows = [
                    orjson.dumps(row) + b"\n"
                    for row, _ in zip(rows_with(source, column), range(most or sys.maxsize), strict=False)
                ]
                file.writelines(rows)
            return {"counts": {"val": len(rows)}}

        command.make_folder(data_path / f"{corpus}-validation_metadata_{column}", COMMAND, made_from, fill)


def rows_with(path: Path, column: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that have an item in the column, without their other metadata."""
    for where, row in json_stream.lines(path):
        if "metadata" in row:
            key = COLUMNS[column].key
            jsonl.check_type(row["metadata"] or [], list[dict], f"{where}: field 'metadata'")
            row["metadata"] = [item for item in row["metadata"] or [] if item.get("key") == key]
            if row["metadata"]:
                yield row
        elif row.get(PREFIX + column):
            yield {
                name: [] if name.startswith(PREFIX) and name != PREFIX + column else value
                for name, value in row.items()
            }


def _share(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if that fails."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


main = command.main_of(COMMAND, __doc__, _add_options, make_sets)

if __name__ == "__main__":
    sys.exit(main())
