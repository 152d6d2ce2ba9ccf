"""A local folder with recently used remote shards, shared by processes.

KEY.part is a partial download and KEY.tar a complete file; KEY is a digest of URL, size and ETag. A reader holds a
shared lock on its file (the reference), at most until its process ends. A downloader holds an exclusive lock on the
part. Only files without a reference are deleted, the least recently used first. The locks use flock, so the folder must
be on a local disk.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from src.errors import ConfigError
from src.systems.interleaved.streaming.manifest import ChangedShardError, Shard, ShardUnavailable
from src.systems.interleaved.streaming.remote.transfer import PIPE, Source, transfer

_LOCK = ".lock"
_OURS = re.compile(r"[0-9a-f]{64}\.(tar|part)")
_POLL = 0.01


class Cached(NamedTuple):
    """An open file of the cache."""

    descriptor: int
    """File descriptor; closing it releases the reference."""
    was_there: bool
    """Whether the file was found without a download or a wait."""


class ShardCache:
    """Files of shards, with at most `limit` bytes in total."""

    def __init__(self, folder: Path, limit: int, patience: float) -> None:
        """patience: give up a shard after this many seconds without progress of a server or another process."""
        self.folder, self.limit, self.patience = folder, limit, patience

    def find(self, shard: Shard) -> int | None:
        """Open a shard's file, with a reference; None if it is not cached."""
        while True:
            try:
                descriptor = os.open(self.path(shard), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            try:
                self._lock(descriptor, fcntl.LOCK_SH, shard.url)
            except BaseException:
                os.close(descriptor)
                raise
            facts = os.fstat(descriptor)
            if facts.st_nlink and facts.st_size == shard.bytes:
                return descriptor
            os.close(descriptor)
            if facts.st_nlink:
                return None  # damaged: it is replaced

    def open(self, shard: Shard, let_go: Callable[[], bool]) -> Cached | None:
        """Open a shard's file; download it if it is missing.
        None if there is no space, and byte ranges can be read from the server instead.

        let_go: releases a reference of this process to free space; returns False if there is nothing to release.

        Raises:
            ConfigError: the shard is larger than the limit, or the folder cannot be used.
            ShardUnavailable, ChangedShardError: it cannot be downloaded.
        """
        if shard.bytes > self.limit:
            raise ConfigError(
                f"{self.folder}: a cache of {self.limit} bytes is too small for {shard.url}, which has {shard.bytes}. "
                "Raise SHARD_CACHE_GB."
            )
        deadline, was_there = time.monotonic() + self.patience, True
        while True:
            if (descriptor := self.find(shard)) is not None:
                return Cached(descriptor, was_there)
            was_there = False
            with self._claim(shard) as part:
                if part is None:
                    continue
                if self._reserve(part, shard, let_go):
                    self._fetch(part, shard)
                    if (descriptor := self.find(shard)) is not None:
                        return Cached(descriptor, was_there)
                    continue
            if not shard.url.startswith(PIPE):
                return None
            if time.monotonic() > deadline:
                raise ShardUnavailable(
                    f"{shard.url}: no room in {self.folder} for {self.patience:g} s: other shards being read fill its "
                    f"{self.limit} bytes. Raise SHARD_CACHE_GB to at least one shard per process."
                )
            time.sleep(_POLL)

    def fetch_ahead(self, shard: Shard, retained_names: Collection[str], unused_since: int) -> bool:
        """Download a shard before it is needed. Returns False if there is no space.

        retained_names: files that must not be deleted for it. unused_since: in nanoseconds; files used after this time
        are not deleted either, as another process can have downloaded them ahead.

        Raises:
            ConfigError, ShardUnavailable, ChangedShardError: as in `open`.
        """
        with self._claim(shard) as part:
            if part is None or self.contains(shard):
                return True
            if not self._reserve(part, shard, lambda: False, retained_names, unused_since):
                return False
            self._fetch(part, shard)
            return True

    def contains(self, shard: Shard) -> bool:
        """Whether a shard is in the cache."""
        return self.path(shard).exists()

    def mark_used(self, shard: Shard) -> None:
        """Mark a shard's file as used now, if it is cached."""
        with contextlib.suppress(OSError):
            os.utime(self.path(shard))

    def path(self, shard: Shard, ending: str = "tar") -> Path:
        """Path of the shard's file, which need not exist."""
        key = f"{shard.url}\n{shard.bytes}\n{shard.etag or ''}"
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.{ending}"

    @staticmethod
    def release(descriptor: int) -> None:
        """Release a reference, and mark the file as used now."""
        with contextlib.suppress(PermissionError):  # a file of another user: only the order of deletions is affected
            os.utime(descriptor)
        os.close(descriptor)

    @contextlib.contextmanager
    def _claim(self, shard: Shard) -> Iterator[int | None]:
        """Open the shard's part with an exclusive lock.
        Yields None if another process has meanwhile finished or abandoned the download.

        The part is deleted at the end of the block, unless it became the shard's file.
        """
        path = self.path(shard, "part")
        with self._refusals(shard):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(part, fcntl.LOCK_EX, shard.url, path)
            if not _is_at(part, path):
                yield None
                return
            try:
                if (descriptor := self.find(shard)) is not None:
                    os.close(descriptor)
                    yield None
                else:
                    yield part
            finally:
                if _is_at(part, path):
                    path.unlink()
        finally:
            os.close(part)

    def _reserve(
        self,
        part: int,
        shard: Shard,
        let_go: Callable[[], bool],
        retained_names: Collection[str] = (),
        unused_since: int | None = None,
    ) -> bool:
        """Reserve space for a shard in its part. Returns False if there is not enough.

        Deletes leftovers of killed processes, then files without a reference, the least recently used first.
        retained_names, unused_since: see `fetch_ahead`.
        """
        with self._folder_lock(shard):
            part_name, files = self.path(shard, "part").name, self._list_files()
            for name in [name for name in files if name.endswith(".part") and name != part_name]:
                if self._delete(name):
                    del files[name]
            used_bytes = sum(facts.st_size for name, facts in files.items() if name != part_name)
            unused = sorted((name for name in files if name.endswith(".tar")), key=lambda name: files[name].st_mtime_ns)
            if unused_since is not None:
                unused = [
                    name for name in unused if name not in retained_names and files[name].st_mtime_ns < unused_since
                ]
            while used_bytes + shard.bytes > self.limit:
                name = next((name for name in unused if self._delete(name)), None)
                if name is not None:
                    unused.remove(name)
                    used_bytes -= files[name].st_size
                elif not let_go():
                    return False
            with self._refusals(shard):
                os.ftruncate(part, 0)
                os.ftruncate(part, shard.bytes)
            return True

    def _fetch(self, part: int, shard: Shard) -> None:
        """Download into a part, then rename it to the shard's file."""
        with self._refusals(shard):
            if shard.bytes:
                os.posix_fallocate(part, 0, shard.bytes)  # detect a full disk before the download
            for attempt in range(2):
                with open(part, "r+b", buffering=0, closefd=False) as file:
                    file.seek(0)
                    digest = transfer(Source(shard.url, shard.bytes, shard.etag), file, self.patience)
                if shard.sha256 in (None, digest):
                    break
                if attempt:
                    raise ChangedShardError(
                        f"{shard.url}: its sha256 differs from the index, also after a second download. Index it again."
                    )
            os.fsync(part)
        with self._folder_lock(shard), self._refusals(shard):
            os.replace(self.path(shard, "part"), self.path(shard))
        self._lock(part, fcntl.LOCK_SH, shard.url)  # prevents deletion until the caller opens it

    @contextlib.contextmanager
    def _folder_lock(self, shard: Shard) -> Iterator[None]:
        """Lock the folder while files are deleted or renamed.
        Without it, a listing could miss a file that is being renamed."""
        with self._refusals(shard):
            folder = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(folder, fcntl.LOCK_EX, f"{self.folder / _LOCK}")
            yield
        finally:
            os.close(folder)

    def _list_files(self) -> dict[str, os.stat_result]:
        """Files of the cache; unrelated files in its folder are ignored."""
        files = dict[str, os.stat_result]()
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if _OURS.fullmatch(entry.name):
                    files[entry.name] = entry.stat(follow_symlinks=False)
        return files

    def _delete(self, name: str) -> bool:
        """Delete a file without a reference. Returns False if it is missing or in use."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, self.folder / name):
                (self.folder / name).unlink()
                return True
        except OSError:  # it is in use, or belongs to another user
            pass
        finally:
            os.close(descriptor)
        return False

    def _lock(self, descriptor: int, kind: int, what: str, path: Path | None = None) -> None:
        """Wait for a lock, or until `path` is another file.

        Raises:
            ShardUnavailable: the file did not change for `patience` seconds, so its holder makes no progress.
        """
        changed_at, changed = time.monotonic(), None
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if path is not None and not _is_at(descriptor, path):
                    return
                facts = os.fstat(descriptor)
                if (facts.st_mtime_ns, facts.st_nlink) != changed:
                    changed_at, changed = time.monotonic(), (facts.st_mtime_ns, facts.st_nlink)
                elif time.monotonic() > changed_at + self.patience:
                    raise ShardUnavailable(
                        f"{what}: another process is downloading it, but made no progress for {self.patience:g} s. "
                        "Stop that process, then start again."
                    ) from None
                time.sleep(_POLL)
            except OSError as error:
                raise ConfigError(
                    f"{self.folder}: this file system does not support locks ({error.strerror}). "
                    "Set SHARD_CACHE to a folder on a local disk."
                ) from None

    @contextlib.contextmanager
    def _refusals(self, shard: Shard) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ShardUnavailable(
                f"{shard.url}: its {shard.bytes} bytes cannot be stored in {self.folder}: {error.strerror}. "
                "Make room there, set SHARD_CACHE to another folder, or lower SHARD_CACHE_GB."
            ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` is the file of an open descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
