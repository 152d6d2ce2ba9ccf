"""List shards from arguments: files, URLs, patterns, ranges such as s-{000..123}.tar, text files, prepared folders."""

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from src.errors import DataError
from src.files import reading
from src.support.redaction import SECRET_VALUE, hide_password
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.remote import objects
from src.systems.interleaved.streaming.remote.objects import Interruption
from src.systems.interleaved.streaming.remote.transfer import PATIENCE, PIPE, REMOTE

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_PATTERN = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_OBJECTS = f"{'BUCKET/KEY, '.join(objects.SCHEMES)}datasets/USER/NAME/PATH"
_READERS = {
    ".gz": "gzip -dc FILE",
    ".tgz": "gzip -dc FILE",
    ".bz2": "bzip2 -dc FILE",
    ".xz": "xz -dc FILE",
    ".zst": "zstd -dc FILE",
}
"""Suffix of a compressed tar -> command that unpacks it."""


class ShardSource(NamedTuple):
    """A shard in a list."""

    url: str
    """An absolute path, "s3://BUCKET/KEY" or "pipe:COMMAND"."""
    source: str = ""
    """Source name of the shard in a prepared folder."""


def list_shards(words: Sequence[str]) -> list[ShardSource]:
    """List the shards of `words`, in order.
    A word is a path, "s3://BUCKET/KEY" or "pipe:COMMAND", or one of these for several shards:

    - a file NAME.txt with one of them per line; its paths are relative to the folder of the file;
    - a folder with shards.json;
    - a pattern with *, ? or [] of paths or of S3 keys, sorted by name;
    - a range {000..123} in any of them, also within a command.

    Raises:
        DataError: nothing matches, or a shard is a duplicate or compressed; names the word or line.
        ConfigError: obstore is not installed, which S3 patterns need.
    """
    shards, places = list[ShardSource](), dict[str, str]()
    for name in words:
        for place, one in _entries(name):
            for source in one:
                if before := places.get(source.url):
                    raise DataError(
                        f"{place}: {source.url} is listed twice, first by {before}. "
                        "Each document would be read twice. Remove one."
                    )
                places[source.url] = place
                shards.append(source)
    if not shards:
        raise DataError(
            "no shards are listed. Name tars, folders with shards.json, or .txt files with a tar on each line."
        )
    return shards


def _entries(name: str) -> Iterator[tuple[str, list[ShardSource]]]:
    """(place for error messages, shards) for each line of a word."""
    path = Path(name)
    if name.startswith(PIPE) or path.suffix != ".txt":
        yield name, _expand(name, Path(), name)
        return
    try:
        with reading(path, DataError):
            lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}. Write a path or URL on each line.") from None
    if not any(line.strip() for line in lines):
        raise DataError(f"{path}: lists no shard. Expected a path, s3://BUCKET/KEY or pipe:COMMAND on each line.")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", _expand(line.strip(), path.parent, f"{path}:{number}")


def _expand(text: str, folder: Path, place: str) -> list[ShardSource]:
    """The shards of a path, URL or command. folder: start of relative paths."""
    return [source for each in _expand_ranges(text, place) for source in _match(each, folder, place)]


def _expand_ranges(text: str, place: str) -> list[str]:
    """Expand the ranges in a text as a shell does: the last range varies fastest; leading zeros stay."""
    match = _RANGE.search(text)
    if not match:
        return [text]
    first, last = match.groups()
    if int(first) > int(last):
        raise DataError(f"{place}: the range {match[0]} is empty. Write the smaller number first.")
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
    rest = _expand_ranges(text[match.end() :], place)
    return [
        f"{text[: match.start()]}{number:0{width}}{end}" for number in range(int(first), int(last) + 1) for end in rest
    ]


def _match(text: str, folder: Path, place: str) -> list[ShardSource]:
    if text.startswith(PIPE):
        if SECRET_VALUE.search(text):
            command = text.removeprefix(PIPE).split(maxsplit=1)[0]
            raise DataError(
                f"{PIPE}{command}: the command contains what looks like a key, which indexes, runs and messages would "
                "show. Export it, and write the name of its variable, such as $TOKEN."
            )
        return [ShardSource(text)]
    if text.endswith(tuple(_READERS)):
        reader = next(each for suffix, each in _READERS.items() if text.endswith(suffix))
        raise DataError(
            f"{place}: {text}: a compressed tar has no random access. "
            f'Unpack it, or use "pipe:{reader}", which unpacks it on each download.'
        )
    if text.startswith(objects.SCHEMES):
        urls = _list_keys(text) if _PATTERN.search(text) else [text]
        if not all(objects.split(url)[2] for url in urls):
            raise DataError(f"{place}: {text}: no key. Expected {objects.split(text)[0]}BUCKET/KEY.")
        return [ShardSource(url) for url in urls]
    if _SCHEME.match(text):
        address = hide_password(text.partition("?")[0])
        place = address if place == text else place
        raise DataError(f"{place}: {address}: expected a path, {_OBJECTS} or pipe:COMMAND, such as pipe:curl -sSf URL.")
    path = folder / text
    if path.is_dir():
        shards = manifest.load(path).shards
        return [ShardSource(_absolute(path, shard.url), shard.source) for shard in shards]
    if path.is_file() or not _PATTERN.search(text):
        return [ShardSource(_absolute(folder, text))]
    matched = sorted(glob.glob(str(path), recursive=True))
    if not matched:
        raise DataError(f"{place}: no file matches {path}. Check the pattern.")
    return [ShardSource(_absolute(Path(), each)) for each in matched]


def _absolute(folder: Path, url: str) -> str:
    return url if url.startswith(REMOTE) else str((folder / url).resolve())


def _list_keys(pattern: str) -> list[str]:
    try:
        urls = objects.list_urls(pattern, PATIENCE)
    except Interruption as error:
        raise DataError(f"{pattern}: its keys cannot be listed: {error}. List each URL instead.") from None
    if not urls:
        raise DataError(f"{pattern}: no key matches. Check the pattern.")
    return urls
