"""Bytes of shards by offset, wherever the shards are."""

import os
from collections import OrderedDict
from pathlib import Path

from src.data.streaming.manifest import Shard
from src.errors import DataError

_OPEN = 64


class ShardError(DataError):
    """A shard cannot be read: all of its documents are lost to this attempt."""


class ShardUnavailable(ShardError):
    """It may be there another time: the network, a server or a disk failed."""


class ShardChanged(ShardError):
    """It is not the one that was indexed: another size, ETag or hash."""


class ShardFiles:
    """Reads from shards, of which the last used are held open. Local files are read where they are, and never deleted."""

    def __init__(self, folder: Path, most_open: int = _OPEN) -> None:
        """folder: of the manifest, from which relative paths go."""
        self.folder, self.most_open = folder, most_open
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, shard: Shard, offset: int, size: int) -> bytes:
        """`size` bytes of a shard from `offset` on.

        Raises:
            ShardChanged: it is not the one that was indexed, or has no such bytes.
            ShardUnavailable: it cannot be read.
        """
        descriptor = self._open.get(shard.url)
        if descriptor is None:
            descriptor = self._open_shard(shard)
        else:
            self._open.move_to_end(shard.url)
        try:
            content = os.pread(descriptor, size, offset)
        except OSError as error:
            raise ShardUnavailable(f"{shard.url}: cannot be read at byte {offset} ({error.strerror}).") from None
        if len(content) < size:
            raise ShardChanged(f"{shard.url}: ends before byte {offset + size}, but had {shard.bytes} bytes when it was indexed.")
        return content

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _open_shard(self, shard: Shard) -> int:
        path = self.folder / shard.url
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ShardUnavailable(f"{path}: cannot be opened ({error.strerror}).") from None
        size = os.fstat(descriptor).st_size
        if size != shard.bytes:
            os.close(descriptor)
            raise ShardChanged(f"{path}: has {size} bytes, and had {shard.bytes} when it was indexed. Index it again.")
        if len(self._open) == self.most_open:
            os.close(self._open.popitem(last=False)[1])
        self._open[shard.url] = descriptor
        return descriptor
