"""Prepared data on disk: folders with a manifest, and JSONL files whose rows are checked field by field."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from src.config import Places, unknown_text
from src.errors import DataError
from src.files import MANIFEST, read_json

_MADE_BY = {"stdlib_": "python -m data_prep.stdlib_qa"}


def corpus(places: Places, name: str) -> Path:
    """Folder of the prepared data set `name`. Its files are those that were written, by size; their hashes are not read.

    Raises:
        DataError: the folder is missing or incomplete; says what makes it, or which data sets there are.
    """
    folder = places.data / name
    if not folder.is_dir():
        command = _command(folder)
        known = sorted(p.parent.name for p in places.data.glob(f"*/{MANIFEST}"))
        raise DataError(f"{folder}: no such data set. {command or unknown_text('corpus', name, known)}")
    _check_sizes(folder)
    return folder


def fingerprint(folder: Path) -> str:
    """sha256 of what the manifest says of the folder's files: the same for the same data, wherever and whenever it was made."""
    manifest = read_json(folder / MANIFEST, DataError)
    return hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()


def require_file(folder: Path, name: str) -> Path:
    """`folder / name`, which the manifest of a data set lists.

    Raises:
        DataError: the data set has no such file.
    """
    names = sorted(read_json(folder / MANIFEST, DataError)["files"])
    if name not in names:
        raise DataError(f"{folder}: has no {name}. It holds: {', '.join(names)}.")
    return folder / name


def read_rows(path: Path, fields: Mapping[str, type], optional: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """Rows of a JSONL file of a prepared data set, each a dict with at least `fields`.

    A field of `optional` may be absent or null; where it is there, its type is checked. `list` means a list of strings
    or of 0 and 1. True is not an int. Blank lines are refused like other lines that are not JSON.

    Raises:
        DataError: the folder is missing or incomplete, the file is missing or empty, or a line is not what it should be.
    """
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder. {_command(path.parent)}".rstrip())
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
        row = json.loads(line)
    except json.JSONDecodeError as bad:
        raise DataError(f"{where}: not valid JSON: {bad.msg} at column {bad.colno}.") from None
    except UnicodeDecodeError as bad:
        raise DataError(f"{where}: not UTF-8 text: {bad.reason} at byte {bad.start}.") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {_shown(row)}.")
    return row


def _check_type(value: Any, kind: type, where: str) -> None:
    if type(value) is not kind:
        raise DataError(f"{where}: expected {kind.__name__}, got {_shown(value)}.")
    if kind is list and not all(isinstance(item, str) or item in (0, 1) for item in value):
        bad = next(item for item in value if not (isinstance(item, str) or item in (0, 1)))
        raise DataError(f"{where}: expected a list of str or of 0 and 1, got {_shown(bad)} in it.")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _check_sizes(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        hint = _command(folder) or "Prepare it again."
        raise DataError(f"{folder}: incomplete, it has no {MANIFEST}. {hint}")
    for name, facts in read_json(folder / MANIFEST, DataError)["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            got = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{path}: {got}, but {facts['bytes']} bytes were written. {_command(folder) or 'Prepare it again.'}")


def _command(folder: Path) -> str:
    """Sentence that says what makes `folder`, empty where nothing of ours does."""
    for prefix, command in _MADE_BY.items():
        if folder.name.startswith(prefix):
            return f"Make it with: {command} --data_path {folder.parent}"
    return ""
