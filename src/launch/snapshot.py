"""A copy of the code for jobs to run, so that later edits do not change them.
It is named by its digest, so equal code is copied once."""

import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from src.errors import LaunchError
from src.files import MANIFEST, defect, new_directory, reading
from src.runs.code_version import SNAPSHOT, code_version, is_python_installation
from src.support.redaction import has_secret_name, secret_in

MAX_FILE_BYTES = 20_000_000
MAX_BYTES = 200_000_000
MAX_NAMES = 10
"""Maximum number of files named in the log."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
"""Folders that are skipped without git, in addition to hidden folders, environments and results."""
_RESERVED = {SNAPSHOT, MANIFEST}
_GIT_SECONDS = 60.0
_TRIES = 3

log = logging.getLogger(__name__)
_CodeFiles = dict[str, tuple[Path, bool, str]]
"""Name relative to the root -> (file, whether it is executable, sha256 of its content)."""


def take(root: Path, snapshots: Path, leave_out: Sequence[Path] = ()) -> Path:
    """Copy the code in `root` to <snapshots>/<digest>, unless that exists; return that folder.

    The code is the files that git tracks or would track, without Python environments; without git, all files outside
    of `SKIPPED_FOLDERS`. Links are followed. Likely secrets are excluded and logged: by their names, and files other
    than modules also by their contents. The digest is
    over paths, modes, contents and the commit.

    leave_out: folders that are not code, such as save directories.

    Raises:
        LaunchError: a file, or all files together, are too large; a file cannot be read, has a reserved name, or
            changes while it is copied.
        RunError: the disk refuses.
    """
    if (root / SNAPSHOT).exists():
        return root  # submitted by a job, which runs from a snapshot
    for _ in range(_TRIES):
        files = _collect_files(root, leave_out)
        version = code_version(root, leave_out)
        final = snapshots / _digest(files, version)
        if final.is_dir() and defect(final) is None:
            return final
        try:
            with new_directory(final) as folder:
                _copy(files, folder)
                (folder / SNAPSHOT).write_text(json.dumps(version, indent=4) + "\n", encoding="utf-8")
        except _ChangedError:
            continue
        return final
    raise LaunchError(
        f"{root}: its files change while they are copied for the jobs. "
        "Wait until nothing writes there, then submit again."
    )


class _ChangedError(Exception):
    """A file changed after it was hashed."""


def _collect_files(root: Path, leave_out: Sequence[Path]) -> _CodeFiles:
    """Every file of the code, with its hash."""
    excluded_folders = [path.resolve() for path in leave_out]
    paths = dict(_git_files(root, excluded_folders) or _walk(root, "", excluded_folders, ()))
    secret = sorted(name for name, path in paths.items() if has_secret_name(name) or _has_secret(path))
    if secret:
        more = f" and {len(secret) - MAX_NAMES} more" if len(secret) > MAX_NAMES else ""
        log.info("likely secrets, not copied for the jobs: %s%s", ", ".join(secret[:MAX_NAMES]), more)
    files: _CodeFiles = {}
    total = 0
    for name in sorted(paths.keys() - set(secret)):
        if name in _RESERVED:
            raise LaunchError(f"{root / name}: this name is reserved for a file of the snapshot. Rename it.")
        path = paths[name]
        try:
            with reading(path, LaunchError), open(path, "rb") as file:
                facts = os.fstat(file.fileno())
                if not stat.S_ISREG(facts.st_mode):
                    continue
                total += facts.st_size
                _check_size(path, facts.st_size, total)
                files[name] = path, bool(facts.st_mode & stat.S_IXUSR), hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            continue  # tracked by git and deleted, or a broken link
    if not files:
        raise LaunchError(f"{root}: contains no code to copy for the jobs. Are all its files ignored by .gitignore?")
    return files


def _has_secret(path: Path) -> bool:
    if path.suffix == ".py" or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return False
    with reading(path, LaunchError):
        return bool(secret_in(path, path.read_bytes()))


def _check_size(path: Path, size: int, total: int) -> None:
    advice = "It is copied with the code for the jobs: move it elsewhere, or add it to .gitignore."
    if size > MAX_FILE_BYTES:
        raise LaunchError(f"{path}: {size:,} bytes, the limit for a file of code is {MAX_FILE_BYTES:,}. {advice}")
    if total > MAX_BYTES:
        raise LaunchError(f"{path}: with it the code has more than {MAX_BYTES:,} bytes. {advice}")


def _git_files(root: Path, excluded_folders: Sequence[Path]) -> dict[str, Path] | None:
    """Files that git tracks or would track below `root`; None if the code is not in a git repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    if done.returncode != 0 or "trainval.py" not in names:
        return None
    folders = {folder for name in names for folder in PurePath(name).parents} - {PurePath()}
    environments = {folder for folder in folders if is_python_installation(root / folder)}
    files: dict[str, Path] = {}
    for name in dict.fromkeys(names):
        path = root / name
        if not environments.isdisjoint(PurePath(name).parents):
            continue
        if path.is_dir():  # a link to a folder, or a repository within this one
            if not _is_in_environment(path, root) and not _is_below(path.resolve(), excluded_folders):
                files.update(_walk(path, name, excluded_folders, (root.resolve(),)))
        elif not excluded_folders or not _is_below(path.resolve(), excluded_folders):
            files[name] = path
    return files


def _walk(
    folder: Path, name: str, excluded_folders: Sequence[Path], above: tuple[Path, ...]
) -> Iterator[tuple[str, Path]]:
    """(name relative to the root, path) of every file below `folder`.
    Links are followed, except into a parent folder."""
    real = folder.resolve()
    if real in above or _is_below(real, excluded_folders):
        return
    with reading(folder, LaunchError):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        inner = f"{name}/{entry.name}" if name else entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if (
                inner != "results"
                and entry.name not in SKIPPED_FOLDERS
                and not _is_in_environment(Path(entry.path), folder)
            ):
                yield from _walk(Path(entry.path), inner, excluded_folders, (*above, real))
        elif not entry.name.endswith((".pyc", ".pyo")):
            yield inner, Path(entry.path)


def _is_in_environment(folder: Path, above: Path) -> bool:
    """Whether `folder`, an entry of `above`, is a Python installation or a link into one.
    Installations around the code itself do not count."""
    real, outside = folder.resolve(), {above.resolve(), *above.resolve().parents}
    return any(is_python_installation(each) for each in (real, *real.parents) if each not in outside)


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _digest(files: _CodeFiles, version: Mapping[str, Any]) -> str:
    version_facts = [version["commit"], version["dirty"]]  # the same files at another commit are another snapshot
    text = json.dumps([version_facts, *([name, runs, content] for name, (_, runs, content) in sorted(files.items()))])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _copy(files: _CodeFiles, folder: Path) -> None:
    for name, (path, runs, content) in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "rb") as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy)
        except FileNotFoundError:
            raise _ChangedError from None
        target.chmod(0o755 if runs else 0o644)
        with open(target, "rb") as copy:
            if hashlib.file_digest(copy, "sha256").hexdigest() != content:
                raise _ChangedError
