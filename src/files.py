"""Atomic files and folders: written under a temporary name, synced, then renamed."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from src.errors import ConfigError, RunError, UserError, system_error
from src.support.parsing import parse_json
from src.support.renaming import NOT_OFFERED, rename_over

MANIFEST = "manifest.json"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")
"""Names of unfinished files of `write_atomic`."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_NO_FILE = {errno.ENXIO, errno.ENODEV, errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_WRONG_PATH = {*_NO_FILE, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}
_REFUSALS = _FULL | _FORBIDDEN | _WRONG_PATH
ROOT = Path(__file__).resolve().parents[1]
"""The folder of this project."""
_REQUIRED: Any = object()
_AGAIN = " Restore the folder from a copy, or run the command that made it again."


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal of a write into a RunError that names `path`.

    Raises:
        RunError: the disk is full, read-only, over quota or forbidden, or `path` leads nowhere, or is a FIFO or a
            socket. Complete files are untouched.
    """
    _refuse_special_file(path, RunError, devices=False)
    try:
        yield
    except Exception as error:
        if (refusal := system_error(error)) is None or refusal.errno not in _REFUSALS:
            raise
        advice = " Nothing complete was lost; make room or choose another folder." if refusal.errno in _FULL else ""
        raise RunError(f"{path}: cannot write: {_reason(refusal, path)}.{advice}") from error


@contextlib.contextmanager
def reading(path: Path, refusal: type[UserError] = RunError) -> Iterator[None]:
    """Turn any OSError of a read into a `refusal` that names `path`, except for a missing file.

    Raises:
        refusal: `path` is a folder, FIFO, socket or device, forbidden, in a loop of links, or the disk fails.
        FileNotFoundError: unchanged; the caller handles it.
    """
    _refuse_special_file(path, refusal)
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refusal(f"{path}: cannot read: {_reason(error, path)}.") from None


def read_bytes(path: Path, refusal: type[UserError] = RunError) -> bytes:
    """The content of a file.

    Raises:
        refusal, FileNotFoundError: as `reading`.
    """
    with reading(path, refusal):
        return path.read_bytes()


def _refuse_special_file(path: Path, refusal: type[UserError], devices: bool = True) -> None:
    """Refuse a FIFO, which would block, a socket, and with `devices` a device. Paths in /dev and /proc are accepted."""
    if path.is_absolute() and path.parts[1:2] in (("dev",), ("proc",)):
        return
    with contextlib.suppress(OSError, ValueError):
        mode = os.stat(path).st_mode
        device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (devices and device):
            kind = "device" if device else "FIFO" if stat.S_ISFIFO(mode) else "socket"
            raise refusal(f"{path}: a {kind}, not a regular file. Move it away.")


def _reason(error: OSError, path: Path) -> str:
    """The system's message, with the file it is about if that is not below the folder of `path`."""
    reason = error.strerror or str(error)
    if not isinstance(error.filename, str) or Path(error.filename).is_relative_to(path.parent):
        return reason
    return f"{reason} ({error.filename})"


def encodable(text: str) -> str:
    """`text` with escapes for halves of surrogate pairs, which JSON can contain and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def write_atomic(path: Path, data: bytes | str, private: bool = False) -> None:
    """Replace `path` with `data`: a reader, or a crash at any moment, sees the old file or the new one.

    private: only its owner can read it.

    Raises:
        RunError: the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    sync = not getattr(_thread, "defers_sync", False)
    with writing(path):
        try:
            with open(temporary, "wb", opener=_open_private if private else None) as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if sync:
            sync_directory(path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def defer_sync(folder: Path) -> Iterator[None]:
    """Within the block this thread's `write_atomic` does not sync; the end of the block syncs all.
    For thousands of small files at once.

    A crash of the process still leaves each file old or new. A power cut within the block can leave empty files, so use
    it only for files that are rewritten if they are damaged.
    """
    _thread.defers_sync = True
    try:
        yield
    finally:
        _thread.defers_sync = False
        _sync_file_system(folder)


_thread = threading.local()


def _sync_file_system(folder: Path) -> None:
    """syncfs(2), or sync(2) if the system does not have it."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:
        os.sync()
        return
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if call(descriptor) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(folder))
        finally:
            os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of sorted, indented JSON. NaN is refused."""
    write_atomic(path, json.dumps(value, indent=4, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path, error: type[UserError], missing: Any = _REQUIRED) -> Any:
    """The JSON value in `path`. missing: the value of a missing file; by default that is an error.

    Raises:
        error: the file is missing, cannot be read or is not JSON; names the file and the line.
    """
    _refuse_special_file(path, error)
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.readall()
    except (FileNotFoundError, NotADirectoryError):
        if missing is not _REQUIRED:
            return missing
        raise error(f"{path}: no such file.") from None
    except OSError as bad:
        raise error(f"{path}: cannot read: {_reason(bad, path)}.") from None
    return parse_json(content, path, error)


def read_yaml(path: Path, expected: str) -> dict[str, Any]:
    """The dict in the YAML file `path`. expected: the expected content, for the message.

    Raises:
        ConfigError: it cannot be read, is not YAML, has a duplicate key, or is not a dict; names the file, and the
            line if known.
    """
    import yaml  # takes 30 ms, and most commands do not need it

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = set()
            for key, _ in node.value:
                if key.value in keys and isinstance(key, yaml.ScalarNode):  # YAML silently takes the last one
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                keys.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        with reading(path, ConfigError):
            raw = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}. Save it as UTF-8.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected {expected}, got {type(raw).__name__}.")
    return raw


def read_manifest(directory: Path, error: type[UserError]) -> dict[str, Any]:
    """The manifest of a folder made by `new_directory`: its facts and "files", {name: {"bytes": int, "sha256": str}}.

    Raises:
        error: it is missing, is not JSON, or does not list files with their sizes and hashes; names the file.
    """
    path = directory / MANIFEST
    try:
        manifest = read_json(path, error)
        files = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(files, dict):
            raise error(f'{path}: not a manifest: expected "files" with file names, got {json.dumps(manifest)[:60]}.')
        for name, facts in files.items():
            if not isinstance(facts, dict) or [type(facts.get(key)) for key in ("bytes", "sha256")] != [int, str]:
                raise error(f'{path}: expected "bytes" and "sha256" of {name!r}, got {json.dumps(facts)[:60]}.')
    except error as problem:
        raise error(f"{problem}{_AGAIN}") from None
    return manifest


@contextlib.contextmanager
def new_directory(
    final: Path,
    facts: dict[str, Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes `final` atomically, with a manifest of sizes and hashes.

    An older `final` is replaced. At any moment, also after an error or a crash, `final` is the complete old or the
    complete new folder. If the system cannot exchange two names in one step (Linux can, on nearly every local file
    system), `final` is absent between two renames, and a crash at that point leaves the old folder as
    `.NAME.xxxxxxxx.old`. Leftovers of killed writers are deleted on entry.

    facts: added to the manifest next to "files" when the block ends, so the block can add to it.
    around: entered while `final` is replaced; if it raises, the old folder stays.

    Raises:
        RunError: the disk refuses.
    """
    if final.is_symlink():
        final = final.resolve()  # replaces the folder and not the link
    with writing(final):
        _sweep(final)
        temporary, lock = _claim(final)
        try:
            yield temporary
            for weights in temporary.rglob("*.safetensors"):  # the library makes them readable only by their owner
                weights.chmod(temporary.stat().st_mode & 0o666)
            paths = (path for path in sorted(temporary.rglob("*")) if path.is_file() and path != temporary / MANIFEST)
            files = {str(path.relative_to(temporary)): path for path in paths}
            file_facts = {name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for name, p in files.items()}
            for path in files.values():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            for inner in (path for path in temporary.rglob("*") if path.is_dir()):
                sync_directory(inner)
            write_json(temporary / MANIFEST, {**(facts or {}), "files": file_facts})
            with around():
                old_folder = rename_over(temporary, final)
            sync_directory(final.parent)
            if old_folder:
                shutil.rmtree(old_folder, ignore_errors=True)  # the next writer sweeps the rest
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)


def _claim(final: Path) -> tuple[Path, int | None]:
    """A new empty folder next to `final`, and the lock that protects it from `_sweep`; None without locks."""
    while True:
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
        temporary.mkdir(parents=True)
        try:
            return temporary, _lock(temporary)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process deleted it just before it was locked
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise
            return temporary, None


def _lock(directory: Path) -> int:
    """A descriptor that holds the lock of `directory` until it is closed, at the latest when this process ends.

    Raises:
        OSError: BlockingIOError if another process holds it, FileNotFoundError if it is gone, or locks are not
            supported.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(directory)  # raises if it was deleted before it was locked
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(final: Path) -> None:
    """Delete leftovers of killed writers of `final`.
    Keep them if locks are not supported, since some can belong to live writers."""
    if not final.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}(\.old)?")
    leftovers = [path for path in final.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]
    for path in leftovers:
        if path.suffix == ".old" and not final.is_dir():
            continue  # the only copy
        with contextlib.suppress(OSError):
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def defect(directory: Path, hashes: bool = True) -> str | None:
    """The first defect of a folder made by `new_directory`, or None: its manifest, or a missing, short or altered file.

    hashes: if False, compare only sizes, so an altered file of the same size is not detected.
    """
    try:
        manifest = read_manifest(directory, RunError)
    except RunError as error:
        return str(error).removesuffix(_AGAIN)
    for name, facts in manifest["files"].items():
        path = directory / name
        try:
            if not path.is_file():
                return f"{path}: missing"
            if path.stat().st_size != facts["bytes"]:
                return f"{path}: {path.stat().st_size} bytes, {facts['bytes']} were written"
            if hashes and sha256(path) != facts["sha256"]:
                return f"{path}: its sha256 is not the one that was written"
        except OSError as error:
            return f"{path}: cannot read: {_reason(error, path)}"
    return None


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_digest(path: Path, edge: int = 2**20, pieces: int = 1024) -> str:
    """sha256 of the first and last `edge` bytes of a file and of `pieces` of 4 KiB between, at even distances:
    few reads of many gigabytes.

    A change of a contiguous 1 / `pieces` of the file or more is detected; a change of a few bytes often is not.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        digest.update(os.pread(file.fileno(), edge, 0) + os.pread(file.fileno(), edge, max(size - edge, 0)))
        if size > 2 * edge:
            for n in range(pieces):
                digest.update(os.pread(file.fileno(), 4096, edge + (size - 2 * edge) * n // pieces))
    return digest.hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
