"""Read bytes of shards by offset: local files, objects of a store, or the output of a command."""

import io
import os
import weakref
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

from src.errors import ConfigError
from src.systems.interleaved.streaming.manifest import (
    ChangedShardError,
    Shard,
    ShardError,
    ShardUnavailable,
    sample_tar,
)
from src.systems.interleaved.streaming.remote.cache import ShardCache
from src.systems.interleaved.streaming.remote.transfer import PATIENCE, REMOTE, Source, transfer

__all__ = ["ChangedShardError", "ShardError", "ShardFiles", "ShardUnavailable"]
_OPEN = 64


class ShardFiles:
    """Reads from shards; recently used ones stay open. Local files are read in place and never deleted.

    Remote shards are downloaded completely into the folder `cache`, which has at most `cache_bytes` and can be shared
    by processes. If other processes use all of it, byte ranges of objects are read from the server, and commands wait
    for free space. Instances can be pickled and forked; the other process opens the files again. Not thread-safe.
    """

    counters: Counter[str]
    """Reads of remote shards: "hits" were in the cache, "misses" waited for a download."""

    def __init__(
        self,
        folder: Path,
        most_open: int = _OPEN,
        cache: Path | None = None,
        cache_bytes: int = 0,
        patience: float = PATIENCE,
        max_cached: int = _OPEN,
    ) -> None:
        """folder: of the manifest; relative paths start there. most_open: maximum number of open files.
        patience: seconds without a new byte until a shard counts as unavailable.

        max_cached: maximum number of cache files that this process references. The cache can delete unreferenced files.
        """
        self.folder, self.most_open, self.counters = folder, most_open, Counter()
        self.cache = None if cache is None else ShardCache(cache, cache_bytes, patience)
        self.max_cached = max_cached
        self._arguments = folder, most_open, cache, cache_bytes, patience, max_cached
        self._open: OrderedDict[str, int] = OrderedDict()
        self._elsewhere = set[str]()
        self._first_seen = dict[str, tuple[int, int]]()
        """Inode and modification time of each local file when it was first opened."""
        _instances.add(self)

    def __reduce__(self) -> Any:
        return ShardFiles, self._arguments

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.close()

    def read(self, shard: Shard, offset: int, size: int) -> bytes:
        """Read `size` bytes of a shard at `offset`.

        Raises:
            ChangedShardError: it changed since it was indexed, or is too short.
            ShardUnavailable: it cannot be read, or cannot be stored in the cache.
            ConfigError: there is no cache, or it is too small.
        """
        descriptor = self._open.get(shard.url)
        if descriptor is not None:
            self._open.move_to_end(shard.url)
            if shard.url in self._elsewhere:
                self.counters["hits"] += 1
        elif shard.url.startswith(REMOTE):
            descriptor = self._open_cached(shard)
            if descriptor is None:
                return self._read_around(shard, offset, size)
        else:
            descriptor = self._open_local(shard)
        try:
            content = os.pread(descriptor, size, offset)
        except OSError as error:
            raise ShardUnavailable(f"{shard.url}: cannot be read at byte {offset} ({error.strerror}).") from None
        first_seen = self._first_seen.get(shard.url)
        if first_seen is not None and os.fstat(descriptor).st_mtime_ns != first_seen[1]:
            raise ChangedShardError(
                f"{self.folder / shard.url}: was written to since it was first read. Index it again."
            )
        if len(content) < size:
            raise ChangedShardError(
                f"{shard.url}: ends before byte {offset + size}, but had {shard.bytes} bytes when it was indexed. "
                "Index it again."
            )
        return content

    def close(self) -> None:
        """Close all files, which releases the cache references."""
        for url in list(self._open):
            self._close(url)

    def _close(self, url: str) -> None:
        descriptor = self._open.pop(url)
        if url in self._elsewhere:
            self._elsewhere.remove(url)
            ShardCache.release(descriptor)
        else:
            os.close(descriptor)

    def _keep(self, url: str, descriptor: int) -> None:
        """Add an open file; close the least recently used ones above the limit."""
        while len(self._open) >= self.most_open:
            self._close(next(iter(self._open)))
        self._open[url] = descriptor

    def _open_local(self, shard: Shard) -> int:
        path = self.folder / shard.url
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ShardUnavailable(f"{path}: cannot be opened ({error.strerror}).") from None
        facts = os.fstat(descriptor)
        if facts.st_size != shard.bytes:
            os.close(descriptor)
            raise ChangedShardError(
                f"{path}: has {facts.st_size} bytes, and had {shard.bytes} when it was indexed. Index it again."
            )
        is_new = shard.sample is not None and shard.url not in self._first_seen
        if is_new and self._is_suspect(shard, facts.st_mtime_ns) and sample_tar(path) != shard.sample:
            os.close(descriptor)
            raise ChangedShardError(f"{path}: was replaced or written to since it was indexed. Index it again.")
        if self._first_seen.setdefault(shard.url, (facts.st_ino, facts.st_mtime_ns)) != (
            facts.st_ino,
            facts.st_mtime_ns,
        ):
            os.close(descriptor)
            raise ChangedShardError(f"{path}: was replaced or written to since it was first read. Index it again.")
        self._keep(shard.url, descriptor)
        return descriptor

    def _is_suspect(self, shard: Shard, mtime_ns: int) -> bool:
        """Whether the modification time suggests that a local tar changed since it was indexed."""
        if shard.mtime_ns is not None:
            return mtime_ns != shard.mtime_ns
        index = self.folder / shard.index
        return index.is_file() and mtime_ns > index.stat().st_mtime_ns

    def _open_cached(self, shard: Shard) -> int | None:
        """Open a remote shard in the cache; None if the cache has no space for it."""
        cached = self._cache_of(shard).open(shard, self._let_go)
        self.counters["hits" if cached and cached.was_there else "misses"] += 1
        if cached is None:
            return None
        while len(self._elsewhere) >= self.max_cached and self._let_go():
            pass
        self._keep(shard.url, cached.descriptor)
        self._elsewhere.add(shard.url)
        return cached.descriptor

    def _cache_of(self, shard: Shard) -> ShardCache:
        if self.cache is None:
            raise ConfigError(f"{shard.url}: a remote shard needs a cache and cache_bytes.")
        return self.cache

    def _let_go(self) -> bool:
        """Release the least recently used cache file. Returns False without one."""
        url = next((url for url in self._open if url in self._elsewhere), None)
        if url is not None:
            self._close(url)
        return url is not None

    def _read_around(self, shard: Shard, offset: int, size: int) -> bytes:
        """Read a byte range of an object from the server, without the cache."""
        if offset + size > shard.bytes:
            raise ChangedShardError(
                f"{shard.url}: ends before byte {offset + size}, but had {shard.bytes} bytes when it was indexed. "
                "Index it again."
            )
        content = io.BytesIO()
        source = Source(shard.url, shard.bytes, shard.etag)
        transfer(source, content, self._cache_of(shard).patience, offset, offset + size)
        return content.getvalue()


def open_files(folder: Path, data: Path, sources: int = 1, max_cached: int = _OPEN) -> ShardFiles:
    """Open the shards of the manifest in `folder`.
    sources: the number of sources that share the file limit of the process.

    Remote shards are cached in DATA/shard_cache, up to 100 GB. The environment variables SHARD_CACHE and
    SHARD_CACHE_GB override the folder and the size. max_cached: see `ShardFiles`.

    Raises:
        ConfigError: SHARD_CACHE_GB is not a number above 0.
    """
    value = os.environ.get("SHARD_CACHE_GB", "100")
    try:
        size = int(float(value) * 1e9)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(f"SHARD_CACHE_GB: expected a number above 0, got {value!r}.")
    cache = Path(os.environ.get("SHARD_CACHE") or data / "shard_cache").expanduser()
    return ShardFiles(folder, max(8, 4 * _OPEN // sources), cache, size, max_cached=max_cached)


_instances: "weakref.WeakSet[ShardFiles]" = weakref.WeakSet()


def _reset_after_fork() -> None:
    """Drop the parent's open files and counts in a forked process."""
    for files in list(_instances):
        files.close()
        files.counters.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
