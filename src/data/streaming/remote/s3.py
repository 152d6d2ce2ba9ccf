"""Objects of S3 and of servers that speak its language: ranges of their bytes, sizes, names; read by obstore.

Which server and whose keys: the variables AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and so on; else the profile AWS_PROFILE of
~/.aws/credentials; else the role of the machine. obstore's threads do not survive a fork, and what is asked of them in a forked process
never returns. A process that was forked after its parent read from S3, such as a worker of a DataLoader, therefore reads through a process
of its own, this module's `main`.
"""

import configparser
import contextlib
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from src.data.streaming.manifest import ShardChanged, ShardUnavailable
from src.errors import ConfigError

SCHEME = "s3://"
_CHUNK = 1 << 16
_started_in = set[int]()
"""The process in which obstore has begun its threads."""


class Interruption(Exception):
    """A transfer was cut off; another try may go on where it ended."""


class Range(NamedTuple):
    """Bytes of an object."""

    total: int
    """Bytes of the whole object."""
    etag: str | None
    chunks: Generator[bytes]
    """Raises Interruption where they are cut off."""


def read_range(url: str, etag: str | None, begin: int, end: int, seconds: float) -> Range:
    """Bytes of an object from `begin` up to `end`. etag: of the object that is meant; None: any. seconds: that the request may take.

    Raises:
        ShardChanged: the object has another ETag.
        ShardUnavailable: there is no such object, or it may not be read.
        Interruption: the server cannot be reached, or fails.
    """
    if _started_in and os.getpid() not in _started_in:
        return _read_elsewhere(url, etag, begin, end, seconds)
    obstore, (store, key) = _import(url), _place(url, seconds)
    options: Any = {"range": (begin, end), **({"if_match": etag} if etag else {})}
    try:
        found = obstore.get(store, key, options=options)
    except (OSError, obstore.exceptions.BaseError) as error:
        raise _explain(url, error) from None
    return Range(found.meta["size"], found.meta["e_tag"], _chunks_of(url, found))


def head(url: str, seconds: float) -> tuple[int, str | None]:
    """Size and ETag of an object. Not in a forked process. Raises as `read_range` does."""
    obstore, (store, key) = _import(url), _place(url, seconds)
    try:
        found = obstore.head(store, key)
    except (OSError, obstore.exceptions.BaseError) as error:
        raise _explain(url, error) from None
    return found["size"], found["e_tag"]


def list_urls(pattern: str, seconds: float) -> list[str]:
    """The URLs of objects that a pattern with *, ? or [] matches, sorted. Not in a forked process. Raises as `read_range` does."""
    bucket, _, key = pattern.removeprefix(SCHEME).partition("/")
    prefix = re.split(r"[*?\[]", key)[0].rpartition("/")[0]
    obstore, (store, _) = _import(pattern), _place(f"{SCHEME}{bucket}/", seconds)
    try:
        keys = [meta["path"] for batch in obstore.list(store, prefix or None) for meta in batch]
    except (OSError, obstore.exceptions.BaseError) as error:
        raise _explain(pattern, error) from None
    return [f"{SCHEME}{bucket}/{found}" for found in sorted(keys) if fnmatch.fnmatchcase(found, key)]


def _import(url: str) -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ModuleNotFoundError:
        raise ConfigError(f"{url}: the package that reads from S3 is not installed: pip install -r requirements/streaming.txt") from None
    return obstore


def _place(url: str, seconds: float) -> tuple[Any, str]:
    """The bucket, as obstore takes it, and the key."""
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    _started_in.add(os.getpid())
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    return _open_bucket(bucket, seconds, endpoint), key


@lru_cache(64)
def _open_bucket(bucket: str, seconds: float, endpoint: str) -> Any:
    from obstore.store import S3Store

    client: Any = {"timeout": f"{max(round(seconds * 1000), 1)}ms", "connect_timeout": "5s", "allow_http": endpoint.startswith("http:")}
    where: Any = {"endpoint": endpoint} if endpoint else {}
    return S3Store(bucket, client_options=client, retry_config={"max_retries": 0}, **where, **_keys_of_profile())


def _keys_of_profile() -> dict[str, Any]:
    """The keys of ~/.aws/credentials, which the command aws and s5cmd read and obstore does not; none where the environment has some."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    profiles = configparser.RawConfigParser()
    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials"
    try:
        profiles.read(path)
    except configparser.Error as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    name = os.environ.get("AWS_PROFILE", "default")
    profile = dict(profiles[name]) if profiles.has_section(name) else {}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key", "aws_session_token": "token"}
    return {ours: profile[theirs] for theirs, ours in names.items() if theirs in profile}


def _chunks_of(url: str, found: Any) -> Generator[bytes]:
    from obstore.exceptions import BaseError

    try:
        yield from map(bytes, found.stream(min_chunk_size=_CHUNK))
    except (OSError, BaseError) as error:
        raise _explain(url, error) from None


_LACKS = {"FileNotFoundError": "no such object", "PermissionDeniedError": "not allowed", "UnauthenticatedError": "not allowed"}
"""Errors after which another try would say the same."""


def _explain(url: str, error: Exception) -> Exception:
    """The error of ours that says what one of obstore means, with the server's own word for it."""
    name, text = type(error).__name__, str(error).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    if name == "PreconditionError" or (code and code[1] == "InvalidRange"):
        what = "ETag" if name == "PreconditionError" else "size"
        return ShardChanged(f"{url}: is another object than the one that was indexed: its {what} has changed. Index it again.")
    if name in _LACKS:
        return ShardUnavailable(f"{url}: {_LACKS[name]}{f' ({code[1]})' if code else ''}.")
    return Interruption(code[1] if code else text.rpartition(" - ")[2].split("\n", 1)[0].rstrip("."))


_readers: dict[int, subprocess.Popen[bytes]] = {}
"""By the process that asks it."""


def _read_elsewhere(url: str, etag: str | None, begin: int, end: int, seconds: float) -> Range:
    """`read_range` in this process's reader, which answers with a line of JSON and then the bytes, in chunks with their sizes before."""
    reader = _readers.get(os.getpid())
    if reader is None or reader.poll() is not None:
        command, root = [sys.executable, "-m", "src.data.streaming.remote.s3"], Path(__file__).resolve().parents[4]
        reader = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _readers[os.getpid()] = reader
    assert reader.stdin
    assert reader.stdout
    try:
        reader.stdin.write(json.dumps([url, etag, begin, end, seconds]).encode() + b"\n")
        reader.stdin.flush()
        first = json.loads(reader.stdout.readline())
    except (OSError, ValueError):
        _end_reader()
        raise Interruption("the process that reads from S3 has ended") from None
    if isinstance(first, list):
        raise {"ShardChanged": ShardChanged, "ShardUnavailable": ShardUnavailable}.get(first[0], Interruption)(first[1])
    chunks = _chunks_from(reader.stdout)
    next(chunks)
    return Range(first["total"], first["etag"], chunks)


def _chunks_from(output: IO[bytes]) -> Generator[bytes]:
    """What the reader answers, after an empty chunk. The reader ends where that is not wanted to its end."""
    whole = False
    try:
        yield b""
        while size := int.from_bytes(output.read(4)):
            yield output.read(size)
        whole = True
    finally:
        if not whole:
            _end_reader()


def _end_reader() -> None:
    with contextlib.suppress(OSError), _readers.pop(os.getpid()) as reader:
        reader.kill()


def main() -> None:
    """Read bytes of objects for a forked process, as long as it asks. An error behind the first line of an answer ends the bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = sys.stdout.buffer
    for line in sys.stdin:
        try:
            found = read_range(*json.loads(line))
        except (ShardChanged, ShardUnavailable, Interruption) as error:
            out.write(json.dumps([type(error).__name__, str(error)]).encode() + b"\n")
        else:
            out.write(json.dumps({"total": found.total, "etag": found.etag}).encode() + b"\n")
            with contextlib.suppress(Interruption):
                for chunk in found.chunks:
                    out.write(len(chunk).to_bytes(4) + chunk)
            out.write(bytes(4))
        out.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
