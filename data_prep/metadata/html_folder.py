"""Collect a folder of HTML pages, such as installed documentation, for `data_prep.metadata.prepare`:

python -m data_prep.metadata.html_folder FOLDER --url https://docs.example.org/ --train train.jsonl --val val.jsonl

A line has the page and its address: --url and the path below FOLDER, percent-encoded. A digest of the path selects one
page of five for validation. Links to the same file and pages of other kinds are skipped.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

from data_prep import command
from src.errors import ConfigError, DataError
from src.files import read_bytes, write_atomic

COMMAND = "python -m data_prep.metadata.html_folder"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", required=True, help="address of the folder, with the last slash")
    parser.add_argument("--train", type=Path, required=True, metavar="FILE", help="JSON lines to write")
    parser.add_argument("--val", type=Path, required=True, metavar="FILE", help="JSON lines to write")


def collect(folder: Path, url: str, train: Path, val: Path) -> None:
    """Write the pages below `folder` to the files `train` and `val`.

    Raises:
        ConfigError: `train` and `val` are one file.
        DataError: no page is there, one cannot be read, or one is not UTF-8.
        RunError: the disk refuses.
    """
    if train.resolve() == val.resolve():
        raise ConfigError(f"--val {val}: the same file as --train. Name another file.")
    candidates = (path for path in folder.rglob("*.*") if path.suffix.lower() in (".html", ".htm", ".xhtml"))
    pages = sorted(path for path in candidates if path.is_file() and not path.is_symlink())
    if not pages:
        raise DataError(f"{folder}: no file below it ends with .html.")
    lines: dict[Path, list[str]] = {train: [], val: []}
    for path in pages:
        name = os.fsencode(path.relative_to(folder).as_posix())
        try:
            html = read_bytes(path, DataError).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 at byte {error.start}. Convert it, or move it away.") from None
        is_val = hashlib.sha256(name).digest()[0] % 5 == 0
        lines[val if is_val else train].append(json.dumps({"url": url + quote(name), "doc_html": html}) + "\n")
    for target, rows in lines.items():
        write_atomic(target, "".join(rows))
    for target, rows in lines.items():
        command.report(f"{target}: {len(rows)} pages", file=target, pages=len(rows))


main = command.main_of(COMMAND, __doc__, _add_options, collect)

if __name__ == "__main__":
    sys.exit(main())
