"""Whole files or none: everything that a later run reads is written beside, synced and renamed."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.errors import RunError, UserError

MANIFEST = "manifest.json"
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk that refuses into a RunError that names `path`.

    Raises:
        RunError: the disk is full, read-only, over quota or forbidden. What was complete before is untouched.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        reason = os.strerror(error.errno or 0)
        raise RunError(f"{path}: cannot write: {reason}. Nothing complete was lost; make room or choose another folder.") from error


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` with `data`: a reader, or a crash at any moment, sees the old file or the new one.

    Raises:
        RunError: the disk refuses.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with writing(path):
        try:
            with open(beside, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of sorted, indented JSON. NaN is refused."""
    write_atomic(path, json.dumps(value, indent=4, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path, error: type[UserError]) -> Any:
    """The JSON value in `path`.

    Raises:
        error: the file is missing or is not JSON; names the file and the line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: no such file.") from None
    except json.JSONDecodeError as bad:
        raise error(f"{path}:{bad.lineno}: not valid JSON: {bad.msg}.") from None
    except UnicodeDecodeError as bad:
        raise error(f"{path}: not UTF-8 text: {bad.reason} at byte {bad.start}.") from None


@contextlib.contextmanager
def new_directory(final: Path, facts: dict[str, Any] | None = None) -> Iterator[Path]:
    """Give an empty folder to fill; on success it becomes `final`, whole, with a manifest of its files' sizes and hashes.

    An older `final` is replaced. After an error, or a crash at any moment, `final` is what it was before.
    `facts` stand in the manifest beside "files"; it is read when the block ends, so the block may add to it.

    Raises:
        RunError: the disk refuses.
    """
    beside = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    with writing(final):
        beside.mkdir(parents=True)
        try:
            yield beside
            files = {str(p.relative_to(beside)): p for p in sorted(beside.rglob("*")) if p.is_file()}
            listed = {name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for name, p in files.items()}
            for path in files.values():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            for inner in (path for path in beside.rglob("*") if path.is_dir()):
                sync_directory(inner)
            write_json(beside / MANIFEST, {**(facts or {}), "files": listed})
            if final.exists():
                old = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.old")
                os.rename(final, old)
                os.rename(beside, final)
                shutil.rmtree(old)
            else:
                os.rename(beside, final)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_directory(final.parent)


def defect(directory: Path) -> str | None:
    """What is wrong with a folder made by `new_directory`: its first missing, short or altered file; None when it is whole."""
    try:
        manifest = read_json(directory / MANIFEST, RunError)
    except RunError as error:
        return str(error)
    for name, facts in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{path}: missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{path}: {path.stat().st_size} bytes, {facts['bytes']} were written"
        if sha256(path) != facts["sha256"]:
            return f"{path}: its sha256 is not the one that was written"
    return None


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
