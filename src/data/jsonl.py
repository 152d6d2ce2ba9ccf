"""Prepared data on disk: folders with a manifest, and JSONL files with rows that are checked field by field."""

import contextlib
import hashlib
import json
import os
import re
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin, overload

from src.data import jsonl_index
from src.data.jsonl_index import RowIndex
from src.errors import DataError
from src.experiments.config import Places, nearest_text, unknown_text
from src.files import MANIFEST, ROOT, read_manifest, reading, sha256
from src.support.parsing import parse_json

SPLITS = ("train", "val")
_MADE_BY = {
    **{f"stdlib_{kind}": "python -m data_prep.crossattn.stdlib_qa" for kind in ("qa", "text", "tokenizer")},
    **dict.fromkeys(
        ("expression_tokenizer", "expression_tasks", "expression_replies", "expression_pairs", "stdlib_doctests"),
        "python -m data_prep.assistants.stdlib_conversations",
    ),
    "stdlib_pages": "python -m data_prep.metadata.stdlib_pages",
    "digit_pages": "python -m data_prep.interleaved.digit_pages",
    "stdlib_t5_tokenizer": (
        "python -m data_prep.t5.t5_tokenizer --from stdlib_tokenizer --name stdlib_t5_tokenizer --sentences 20"
    ),
}
_RELEASES_OF_CONVERSATIONS = ROOT / "resources" / "conversations"
_RELEASES = "SQuAD, HotpotQA, Natural Questions, MS MARCO, TopiOCQA, TriviaQA"


def corpus_folder(places: Places, name: str) -> Path:
    """Folder of the prepared data set `name`. Compares the sizes of its files with the manifest, not their hashes.

    Raises:
        DataError: the folder is missing or incomplete. The message has the command that makes it, or the known data
            sets.
    """
    folder = places.data / name
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for a name that is too long
        raise DataError(f"{folder}: no such data set{_known_corpora_hint(places, name)}")
    _check_sizes(folder)
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a data set. For a folder made by hand: the sizes and hashes of its splits.

    Raises:
        DataError: the manifest is missing or damaged.
    """
    if (folder / MANIFEST).is_file() or not _is_made_by_hand(folder):
        return read_manifest(folder, DataError)
    states = {name: os.stat(folder / name) for name in map("{}.jsonl".format, SPLITS)}
    return {
        "files": {
            name: {
                "bytes": state.st_size,
                "sha256": _hash_once(folder / name, state.st_size, state.st_mtime_ns, state.st_ino),
            }
            for name, state in states.items()
        }
    }


@lru_cache(maxsize=64)
def _hash_once(path: Path, *_: int) -> str:
    """Hash a file once per state of it."""
    with reading(path, DataError):
        return sha256(path)


def _is_made_by_hand(folder: Path) -> bool:
    """Whether a folder has both splits, no manifest, and no script in this project that makes it."""
    return folder.name not in _MADE_BY and all((folder / f"{split}.jsonl").is_file() for split in SPLITS)


def fingerprint(folder: Path, split: str = "") -> str:
    """sha256 of the manifest's entries of all files, or of one split's: does not depend on place and time."""
    files = manifest_of(folder)["files"]
    return hashlib.sha256(json.dumps(files[f"{split}.jsonl"] if split else files, sort_keys=True).encode()).hexdigest()


def require_file(folder: Path, name: str) -> Path:
    """Return `folder / name` if the manifest of the data set lists it.

    Raises:
        DataError: the data set has no such file.
    """
    names = sorted(manifest_of(folder)["files"])
    if name not in names:
        raise DataError(
            f"{folder}: has no {name}. Files: {', '.join(names)}. Use one of these, or prepare it again with this file."
        )
    return folder / name


def require_splits(places: Places, name: str) -> None:
    """Check that a data set is complete, without reading its rows.

    Raises:
        DataError: it is missing or incomplete. The message has the command that makes it.
    """
    folder = corpus_folder(places, name)
    for split in SPLITS:
        require_file(folder, f"{split}.jsonl")


def read_rows(
    path: Path,
    fields: Mapping[str, Any],
    optional: Mapping[str, Any] | None = None,
    check: "Callable[[dict[str, Any], str], object] | None" = None,
    group: "Callable[[dict[str, Any]], str] | None" = None,
    rules: str | None = None,
) -> "Rows":
    """Open a JSONL file of a prepared data set. Each row is a dict with at least `fields`: checked here, parsed again
    on access.

    group: the group of a row, for `Rows.row_index`. rules: name and version of `check` and `group`. With rules, one
    process checks a large file once while the other processes wait, and later starts map the saved index.

    A type is str, int, float, bool or a list of one of them, such as `list[str]`; True is not an int. A field of
    `optional` can be absent or null. A blank line is an error. `check(row, "FILE:LINE")` can raise an error for a row.

    Raises:
        DataError: the folder is missing or incomplete, the file is missing or empty, or a line is malformed.
    """
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder. {preparation_hint(path.parent) or 'Check the path.'}")
    _check_sizes(path.parent)
    rows, key = Rows(path, RowIndex(array("Q", [0]), (), ())), None
    with reading(path, DataError), open(rows.file, "rb", closefd=False) as file, contextlib.ExitStack() as stack:
        if rules is not None and os.fstat(rows.file).st_size >= jsonl_index.MIN_BYTES:
            types = {name: repr(kind) for name, kind in {**fields, **(optional or {})}.items()}
            key = jsonl_index.key_of(file, rows.facts, {"name": rules, "required": sorted(fields), "types": types})
            index = jsonl_index.read(path, key)
            if index is None:
                stack.enter_context(jsonl_index.one_builder(file))
                index = jsonl_index.read(path, key)  # written by the process that this one waited for
            if index is not None:
                rows.row_index = index
                return rows
        ends, groups, names = array("Q", [0]), array("I"), dict[str, int]()
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            row = parse(line, where)
            check_fields(row, fields, optional or {}, where)
            if check is not None:
                check(row, where)
            if group is not None:
                groups.append(names.setdefault(group(row), len(names)))
            ends.append(ends[-1] + len(line))
        if len(ends) == 1:
            raise DataError(f"{path}: empty. It should have one JSON object on each line.")
        rows.row_index = (
            RowIndex(ends, groups, list(names))
            if key is None
            else jsonl_index.write(path, key, ends, groups, list(names))
        )
    return rows


class Rows(Sequence[dict[str, Any]]):
    """Rows of a checked JSONL file, parsed on access. A row takes twelve bytes of memory, or none with an index on
    disk.

    Can be pickled, copied and shared by forked workers: every read passes its own position in the file. If the file is
    replaced, this object still reads the old one; a process that opens it again raises an error.
    """

    def __init__(self, path: Path, index: RowIndex, facts: object = None) -> None:
        """facts: the manifest's entry of the file; None: the current one."""
        self.path = path
        self.row_index = index
        self.facts = facts or self._manifest_entry()
        self._file: int | None = None
        self._last: tuple[int, dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.row_index.ends) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """One row, or a list of several. The last row is cached, so that its fields can be read one by one.

        Raises:
            DataError: the file has changed since it was checked.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        last = self._last
        if last is None or last[0] != number:
            start, end = self.row_index.ends[number], self.row_index.ends[number + 1]
            last = self._last = number, self._parse_row(self._read_bytes(start, end), number)
        return last[1]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows, read in blocks of one mebibyte."""
        first, total, ends = 0, len(self), self.row_index.ends
        while first < total:
            last = first + 1
            while last < total and ends[last + 1] - ends[first] <= 1 << 20:
                last += 1
            start = ends[first]
            piece = self._read_bytes(start, ends[last])
            for number in range(first, last):
                yield self._parse_row(piece[ends[number] - start : ends[number + 1] - start], number)
            first = last

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same rows."""
        if not isinstance(other, Rows | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  as a list

    def __getstate__(self) -> tuple[Path, RowIndex, object]:
        """Everything but the open file."""
        return self.path, self.row_index, self.facts

    def __setstate__(self, state: tuple[Path, RowIndex, object]) -> None:
        self.__init__(*state)

    @property
    def file(self) -> int:
        """Descriptor of the file, opened at first use in each process.

        Raises:
            DataError: the file is gone, or its manifest entry has changed.
        """
        if self._file is None:
            if self._manifest_entry() != self.facts:
                raise DataError(f"{self.path}: the data set changed during this run. Start the run again.")
            try:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                hint = preparation_hint(self.path.parent) or "Prepare the data set again."
                raise DataError(f"{self.path}: no such file. {hint}") from None
            weakref.finalize(self, os.close, self._file)
        return self._file

    def _manifest_entry(self) -> object:
        return manifest_of(self.path.parent)["files"].get(self.path.name, {})

    def _parse_row(self, line: bytes, number: int) -> dict[str, Any]:
        return parse(line, f"{self.path}:{number + 1}")

    def _read_bytes(self, start: int, end: int) -> bytes:
        """Read bytes start..end without moving the file position, which other processes or threads can share."""
        with reading(self.path, DataError):
            data = os.pread(self.file, end - start, start)
            while len(data) < end - start and (more := os.pread(self.file, end - start - len(data), start + len(data))):
                data += more
        if len(data) < end - start:
            raise DataError(
                f"{self.path}: shorter than the {self.row_index.ends[-1]} bytes read at the start. "
                "Prepare the data set again."
            )
        return data


def count_lines(path: Path) -> int | None:
    """Count the lines of a file without parsing them; None for a large file."""
    with reading(path, DataError), open(path, "rb") as file:
        return None if os.fstat(file.fileno()).st_size >= jsonl_index.MIN_BYTES else sum(1 for _ in file)


def select_validation_rows(total: int, count: int, path: Path) -> list[int]:
    """Select `count` of the indices 0..total-1, depending only on `total`, so that all experiments score the same rows.

    Raises:
        DataError: `path` has fewer than `count` rows.
    """
    if count > total:
        raise DataError(
            f"{path}: {count} validation samples requested, only {total} available. "
            "Lower the number, or set it to null for all."
        )
    return Random(f"validation/{total}").sample(range(total), total)[:count]


def parse(line: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object on one line.

    Raises:
        DataError: it is not a JSON object, or Python cannot read it. The message starts with `where`.
    """
    row = parse_json(line.rstrip(b"\r\n"), where, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {_describe(row)}.")
    return row


def check_fields(row: Mapping[str, Any], fields: Mapping[str, Any], optional: Mapping[str, Any], where: str) -> None:
    """Raise DataError, with `where`, if a field of a row is missing or has another type; see `read_rows`."""
    for name, kind in fields.items():
        if name not in row:
            raise DataError(
                f"{where}: field {name!r} is missing.{nearest_text([name], row)} Fields: {', '.join(row) or 'none'}."
            )
        check_type(row[name], kind, f"{where}: field {name!r}")
    for name, kind in optional.items():
        if row.get(name) is not None:
            check_type(row[name], kind, f"{where}: field {name!r}")


def check_type(value: Any, kind: Any, where: str) -> None:
    """Raise DataError, with `where`, unless `value` is of type `kind` and its text is valid Unicode."""
    outer = get_origin(kind) or kind
    if type(value) is not outer:
        raise DataError(f"{where}: expected {outer.__name__}, got {_describe(value)}.")
    if outer is str and not value.isascii():
        check_text(value, where)
    for inner in get_args(kind):
        plain = inner if get_origin(inner) is None else None
        for index, item in enumerate(value):
            if type(item) is not plain or (plain is str and not item.isascii()):
                check_type(item, inner, f"{where}[{index}]")


def check_text(text: str, where: str) -> None:
    """Raise DataError for half a surrogate pair, which JSON can contain but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        raise DataError(
            f"{where}: \\u{ord(text[bad.start]):04x} at character {bad.start} is half of a surrogate pair, not text. "
            "Remove it."
        ) from None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _check_sizes(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        if _is_made_by_hand(folder):
            return
        hint = preparation_hint(folder) or "Prepare it again, or add both train.jsonl and val.jsonl."
        raise DataError(f"{folder}: incomplete, it has no {MANIFEST}. {hint}")
    for name, facts in read_manifest(folder, DataError)["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            got = "missing" if size is None else f"{size} bytes"
            raise DataError(
                f"{path}: {got}, expected {facts['bytes']} bytes. {preparation_hint(folder) or 'Prepare it again.'}"
            )


def preparation_hint(folder: Path) -> str:
    """A sentence with the command that makes `folder`; empty if no command is known."""
    if folder.name not in _MADE_BY and folder.parent.name == "digit_pages":  # its folders train, val and tokenizer
        folder = folder.parent
    command = _MADE_BY.get(folder.name)
    if command is None and _is_release_of_conversations(folder.name):
        command = f"python -m data_prep.assistants.prepare_conversations --name {folder.name}"
    return f"Make it with: {command} --data_path {folder.parent}" if command else ""


def _is_release_of_conversations(name: str) -> bool:
    """Whether data_prep.assistants.prepare_conversations can prepare it."""
    entry = re.compile(rf"^{re.escape(name)}:", re.MULTILINE)
    return any(entry.search(path.read_text(encoding="utf-8")) for path in _RELEASES_OF_CONVERSATIONS.glob("*.yaml"))


def _known_corpora_hint(places: Places, name: str) -> str:
    """Text after "no such data set": the command that makes it, or the existing data sets and how to add one."""
    command = preparation_hint(places.data / name)
    if command:
        return f". {command}"
    folders = [path for path in places.data.glob("*") if (path / MANIFEST).is_file() or _is_made_by_hand(path)]
    names = [path.name for path in folders if (path / f"{SPLITS[0]}.jsonl").exists() or any(path.glob("*.ids"))]
    files = ", ".join(f"{split}.jsonl" for split in SPLITS)
    return (
        f": {unknown_text('corpus', name, names, str(places.data))} These are prepared in {places.data}; a script of "
        f"data_prep adds another, a folder with {files}, or --data_path names the folder that holds it. With "
        f"--data_path {places.data} --name {name}, questions on contexts are prepared from their releases ({_RELEASES})"
        " by python -m data_prep.crossattn.prepare_qa, tasks of GLUE and SuperGLUE by data_prep.t5.prepare_task, text "
        "by data_prep.tokenize."
    )
