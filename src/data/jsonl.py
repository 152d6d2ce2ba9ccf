"""Prepared data on disk: folders with a manifest, and JSONL files whose rows are checked field by field."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin

from src.config import Places, unknown_text
from src.errors import DataError
from src.files import MANIFEST, read_manifest

SPLITS = ("train", "val")
_MADE_BY = {f"stdlib_{kind}": "python -m data_prep.stdlib_qa" for kind in ("qa", "text", "tokenizer")}


def corpus(places: Places, name: str) -> Path:
    """Folder of the prepared data set `name`. Its files are those that were written, by size; their hashes are not read.

    Raises:
        DataError: the folder is missing or incomplete; says what makes it, or which data sets there are.
    """
    folder = places.data / name
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for a name that is too long
        raise DataError(f"{folder}: no such data set{_instead(places, name)}")
    _check_sizes(folder)
    return folder


def fingerprint(folder: Path) -> str:
    """sha256 of what the manifest says of the folder's files: the same for the same data, wherever and whenever it was made."""
    manifest = read_manifest(folder, DataError)
    return hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()


def require_file(folder: Path, name: str) -> Path:
    """`folder / name`, which the manifest of a data set lists.

    Raises:
        DataError: the data set has no such file.
    """
    names = sorted(read_manifest(folder, DataError)["files"])
    if name not in names:
        raise DataError(f"{folder}: has no {name}. It holds: {', '.join(names)}.")
    return folder / name


def require_splits(places: Places, name: str) -> None:
    """Refuse a data set that is missing or incomplete, without reading its rows.

    Raises:
        DataError: says what makes it.
    """
    folder = corpus(places, name)
    for split in SPLITS:
        require_file(folder, f"{split}.jsonl")


def read_rows(path: Path, fields: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows of a JSONL file of a prepared data set, each a dict with at least `fields`.

    A type is str, int, float, bool or a list of one of them, as `list[str]`; True is not an int. A field of `optional` may be
    absent or null. A blank line is refused like any other that is not JSON.

    Raises:
        DataError: the folder is missing or incomplete, the file is missing or empty, or a line is not what it should be.
    """
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder. {made_by(path.parent)}".rstrip())
    _check_sizes(path.parent)
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            row = _parse(line, f"{path}:{number}")
            for name, kind in fields.items():
                if name not in row:
                    raise DataError(f"{path}:{number}: field {name!r} is missing. Fields: {', '.join(row) or 'none'}.")
                _check_type(row[name], kind, f"{path}:{number}: field {name!r}")
            for name, kind in (optional or {}).items():
                if row.get(name) is not None:
                    _check_type(row[name], kind, f"{path}:{number}: field {name!r}")
            rows.append(row)
    if not rows:
        raise DataError(f"{path}: empty. It should have one JSON object on each line.")
    return rows


def first_of_permutation(total: int, count: int, path: Path) -> list[int]:
    """`count` of the indices 0..total-1 in an order that depends on `total` alone: all experiments are scored on the same rows.

    Raises:
        DataError: there are fewer than `count` in `path`.
    """
    if count > total:
        raise DataError(f"{path}: {count} validation samples are wanted, it has {total}. Ask for no more, or for null to take all.")
    return Random(f"validation/{total}").sample(range(total), total)[:count]


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip(b"\r\n"))
    except json.JSONDecodeError as bad:
        raise DataError(f"{where}: not valid JSON: {bad.msg.removesuffix(' at')} at column {bad.colno}.") from None
    except UnicodeDecodeError as bad:
        raise DataError(f"{where}: not UTF-8 text: {bad.reason} at byte {bad.start}.") from None
    except RecursionError:
        raise DataError(f"{where}: lists or objects are nested too deep to be read.") from None
    except ValueError as bad:
        raise DataError(f"{where}: a number cannot be read: {str(bad).split(';')[0]}.") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {_shown(row)}.")
    return row


def _check_type(value: Any, kind: Any, where: str) -> None:
    outer = get_origin(kind) or kind
    if type(value) is not outer:
        raise DataError(f"{where}: expected {outer.__name__}, got {_shown(value)}.")
    if outer is str and not value.isascii():
        _check_text(value, where)
    for inner in get_args(kind):
        for index, item in enumerate(value):
            _check_type(item, inner, f"{where}[{index}]")


def _check_text(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        raise DataError(f"{where}: \\u{ord(text[bad.start]):04x} at character {bad.start} is half of a surrogate pair, not text.") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _check_sizes(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        hint = made_by(folder) or "Prepare it again."
        raise DataError(f"{folder}: incomplete, it has no {MANIFEST}. {hint}")
    for name, facts in read_manifest(folder, DataError)["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            got = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{path}: {got}, but {facts['bytes']} bytes were written. {made_by(folder) or 'Prepare it again.'}")


def made_by(folder: Path) -> str:
    """A sentence that says what makes `folder`, empty where nothing of ours does."""
    command = _MADE_BY.get(folder.name)
    return f"Make it with: {command} --data_path {folder.parent}" if command else ""


def _instead(places: Places, name: str) -> str:
    """What follows "no such data set": the command that makes it, or which there are and how another is added."""
    command = made_by(places.data / name)
    if command:
        return f". {command}"
    known = [p.parent.name for p in places.data.glob(f"*/{MANIFEST}") if (p.parent / f"{SPLITS[0]}.jsonl").exists()]
    files = ", ".join(f"{split}.jsonl" for split in SPLITS)
    return (
        f": {unknown_text('corpus', name, known)} These are prepared in {places.data}; a script of data_prep adds another, "
        f"a folder with {files} and {MANIFEST}, or --data_path names the folder that holds it."
    )
