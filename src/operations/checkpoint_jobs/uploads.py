"""Copies files elsewhere, and believes that they are there only when size and sha256 were read back from there.

`python -m src.operations.checkpoint_jobs.uploads < FILE` prints sha256 and size of its standard input: the end of a
readback command.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from src.errors import RunError
from src.files import MANIFEST, read_manifest, sha256, sync_directory

_PIECE = 1 << 20
_SUM = re.compile(r"\b([0-9a-fA-F]{64})\b")
FileDigest = tuple[int, str]
"""Size in bytes and sha256 in lower-case hex."""
Check = Callable[[], object]
"""Called between files; what it raises ends the upload."""


@dataclass(frozen=True)
class Local:
    """A folder that exists, on this machine or mounted."""

    root: Path

    def send(self, file: Path, name: str) -> None:
        """Copy `file` to `name`, which appears whole.

        Raises:
            RunError: the folder is not there, or refuses.
        """
        target = self.root / name
        beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        self._check()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(file, "rb") as source, open(beside, "wb") as copy:
                    shutil.copyfileobj(source, copy, _PIECE)
                    copy.flush()
                    os.fsync(copy.fileno())
                os.replace(beside, target)
                sync_directory(target.parent)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{target}: cannot copy {file} there: {error.strerror or error}.") from error

    def read_back(self, name: str) -> FileDigest | None:
        """Size and sha256 of uploaded `name`, read from the disk where the system allows it; None if missing.

        Raises:
            RunError: the folder is not there, or the file cannot be read.
        """
        self._check()
        try:
            with open(self.root / name, "rb") as file:
                with contextlib.suppress(OSError, AttributeError):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return file.tell(), digest
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RunError(f"{self.root / name}: cannot be read back: {error.strerror or error}.") from error

    def _check(self) -> None:
        if not self.root.is_dir():
            raise RunError(
                f"{self.root}: no such folder to upload to. "
                "Is it mounted? It is not made here: an unmounted disk has none."
            )


@dataclass(frozen=True)
class Commands:
    """A place that only commands reach."""

    send_command: Callable[[Path, str], str]
    """(file, name) -> the shell command that copies it."""
    read_command: Callable[[str], str]
    timeout_seconds: float
    log: Path

    def send(self, file: Path, name: str) -> None:
        """Copy `file` to `name`.

        Raises:
            RunError: the command failed, or took too long.
        """
        code, _ = self._run(self.send_command(file, name))
        if code:
            raise RunError(f"{file}: the upload command ended with {code}; see {self.log}.")

    def read_back(self, name: str) -> FileDigest | None:
        """What the command prints of `name`; None where it fails, as it does for nothing.

        Raises:
            RunError: it ends well, but prints no sha256 and size.
        """
        code, text = self._run(self.read_command(name))
        if code:
            return None
        digest = _SUM.search(text)
        numbers = re.findall(r"(?<!\S)\d+(?!\S)", text.replace(digest[1], " ") if digest else "")
        if digest is None or len(numbers) != 1:
            raise RunError(
                f"readback of {name}: expected one sha256 (64 hex digits) and one size in bytes, got "
                f"{text.strip()[:200]!r}."
            )
        return int(numbers[0]), digest[1].lower()

    def _run(self, command: str) -> tuple[int, str]:
        with open(self.log, "ab") as log:
            log.write(f"$ {command}\n".encode())
            log.flush()
            try:
                done = subprocess.run(
                    ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                    timeout=self.timeout_seconds, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise RunError(
                    f"the command took longer than {self.timeout_seconds:g} s (timeout_seconds): {command}"
                ) from None
            log.write(done.stdout)
        return done.returncode, done.stdout.decode("utf-8", errors="replace")


Destination = Local | Commands


def file_digests(folder: Path) -> dict[str, FileDigest]:
    """The files of a folder made by `files.new_directory`, its manifest among them, as they were written.

    Raises:
        RunError: the manifest is missing or damaged.
    """
    files = read_manifest(folder, RunError)["files"]
    found = {name: (facts["bytes"], facts["sha256"]) for name, facts in files.items()}
    return {**found, MANIFEST: ((folder / MANIFEST).stat().st_size, sha256(folder / MANIFEST))}


def upload(folder: Path, prefix: str, there: Destination, check: Check) -> dict[str, FileDigest]:
    """Copy the files of a folder with a manifest to <prefix>/<name>; the manifest goes last.
    Returns what was read back, by name there.

    What is there already, as it should be, is not sent again.

    Raises:
        RunError: the source is damaged, the destination refuses, or what is read back from it differs.
    """
    wanted = file_digests(folder)
    for name, fact in wanted.items():
        check()
        target = f"{prefix}/{name}"
        if there.read_back(target) == fact:
            continue
        if (folder / name).stat().st_size != fact[0] or sha256(folder / name) != fact[1]:
            raise RunError(f"{folder / name}: not as it was written (see {MANIFEST}), so it is not uploaded.")
        there.send(folder / name, target)
        if (found := there.read_back(target)) != fact:
            raise RunError(
                f"{target}: read back from the destination as {describe_digest(found)}, sent were "
                f"{describe_digest(fact)}."
            )
    return {f"{prefix}/{name}": fact for name, fact in wanted.items()}


def find_difference(recorded: Mapping[str, FileDigest], there: Destination, check: Check) -> str | None:
    """The first file that cannot be read back as recorded, and what is found; None: all can.

    Raises:
        RunError: the destination cannot be read.
    """
    for name, fact in recorded.items():
        check()
        if (found := there.read_back(name)) != fact:
            return (
                f"{name}: read back from the destination as {describe_digest(found)}, uploaded were "
                f"{describe_digest(fact)}"
            )
    return None


def describe_digest(fact: FileDigest | None) -> str:
    """A size and a hash in words."""
    return "nothing" if fact is None else f"{fact[0]} bytes of sha256 {fact[1][:12]}…"


def main() -> int:
    """Print the sha256 and the size of the standard input."""
    digest, size = hashlib.sha256(), 0
    while piece := sys.stdin.buffer.read(_PIECE):
        digest.update(piece)
        size += len(piece)
    sys.stdout.write(f"{digest.hexdigest()} {size}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
