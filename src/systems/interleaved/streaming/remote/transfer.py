"""Download a remote shard into a file. After an interruption an object resumes at the last byte; a command restarts.

The number of retries is unlimited: a transfer fails only if no new byte arrives for some time.
"""

import contextlib
import hashlib
import os
import random
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from typing import IO, NamedTuple

from src.systems.interleaved.streaming.manifest import ChangedShardError, ShardUnavailable
from src.systems.interleaved.streaming.remote import objects
from src.systems.interleaved.streaming.remote.objects import Interruption

PIPE = "pipe:"
REMOTE = (*objects.SCHEMES, PIPE)
PATIENCE = 25.0
"""Seconds without a new byte after which a transfer fails."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SHORTEST_REQUEST, _LONGEST_REQUEST = 0.5, 30.0
"""Timeouts of a request, in seconds."""
_AT_ONCE = 1 << 20


class Source(NamedTuple):
    """A remote shard."""

    url: str
    size: int | None
    """Size in bytes; None if unknown, as for a command."""
    etag: str | None = None


class _Tries:
    """Pauses between attempts, and the decision to give up."""

    def __init__(self, url: str, patience: float) -> None:
        self.url, self.patience, self.pause, self.best, self.since = url, patience, _FIRST_PAUSE, 0, time.monotonic()
        self.longest_request = min(max(patience / 2, _SHORTEST_REQUEST), _LONGEST_REQUEST)

    def wait(self, at: int, error: Interruption) -> None:
        """Pause before the next attempt. at: bytes received before the interruption.

        Raises:
            ShardUnavailable: no new byte arrived for `patience` seconds.
        """
        now = time.monotonic()
        if at > self.best:
            self.best, self.since, self.pause = at, now, _FIRST_PAUSE
        if now + self.pause > self.since + self.patience:
            raise ShardUnavailable(
                f"{self.url}: given up at byte {at}: no new byte in {self.patience:.3g} s: {error}. "
                "Check the network and the server."
            ) from None
        time.sleep(self.pause * random.SystemRandom().uniform(0.5, 1))
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)


def source_of(url: str, patience: float = PATIENCE) -> Source:
    """Look up the size and the ETag of a URL. Not for forked processes.

    Raises:
        ShardUnavailable: there is no such object, or the server does not answer.
    """
    tries = _Tries(url, patience)
    while url.startswith(objects.SCHEMES):
        try:
            return Source(url, *objects.head(url, tries.longest_request))
        except Interruption as error:
            tries.wait(0, error)
    return Source(url, None)


def transfer(
    source: Source, file: IO[bytes], patience: float = PATIENCE, begin: int = 0, end: int | None = None
) -> str:
    """Download a byte range of a shard, by default all of it, into an empty file; returns the SHA-256.
    Commands are always downloaded completely.

    Raises:
        ChangedShardError: the size or the ETag differs.
        ShardUnavailable: no new byte arrived for `patience` seconds, or the shard does not exist.
        OSError: the file cannot be written.
    """
    end = source.size if end is None else end
    is_command, tries = source.url.startswith(PIPE), _Tries(source.url, patience)
    digest, num_bytes = hashlib.sha256(), 0
    while begin + num_bytes != end:
        try:
            if is_command:
                chunks = _run(source, patience)
            else:
                response = objects.read_range(
                    source.url, source.etag, begin + num_bytes, end or 0, tries.longest_request
                )
                source = source._replace(etag=source.etag or response.etag)  # later ranges must be from the same object
                chunks = _check(source, response, (end or 0) - begin - num_bytes)
            with contextlib.closing(chunks):
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
            break
        except Interruption as error:
            tries.wait(begin + num_bytes, error)
            if is_command:
                file.seek(0)
                digest, num_bytes = hashlib.sha256(), 0
    return digest.hexdigest()


def _check(source: Source, response: objects.Range, size: int) -> Generator[bytes]:
    """Yield the bytes of a response; raises Interruption if they are fewer than `size`."""
    with contextlib.closing(response.chunks):
        if response.total != source.size:
            raise ChangedShardError(
                f"{source.url}: has {response.total} bytes, and had {source.size} when it was indexed. Index it again."
            )
        for chunk in response.chunks:
            yield chunk
            size -= len(chunk)
    if size:
        raise Interruption(f"{size} bytes are missing")


def _run(source: Source, patience: float) -> Generator[bytes]:
    """Yield the output of a command; raises Interruption if it fails, stalls, or writes too little."""
    command, count = ["bash", "-o", "pipefail", "-c", source.url.removeprefix(PIPE)], 0
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as process,
    ):
        assert process.stdout
        try:
            while True:
                if not select.select([process.stdout], [], [], patience)[0]:
                    raise Interruption(f"the command wrote nothing for {patience:g} s")
                if not (chunk := os.read(process.stdout.fileno(), _AT_ONCE)):
                    break
                count += len(chunk)
                if source.size is not None and count > source.size:
                    raise ChangedShardError(
                        f"{source.url}: the command writes more than the {source.size} bytes that were indexed. "
                        "Index it again."
                    )
                yield chunk
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            raise Interruption(f"the command does not end after its last byte, {count}") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        last_line = f": {lines[-1][:200].rstrip('.')}" if lines else ""
        if status:
            raise Interruption(f"the command ended with exit status {status}{last_line}")
        if source.size is not None and count < source.size:
            raise Interruption(f"the command ended with {count} of {source.size} bytes{last_line}")
