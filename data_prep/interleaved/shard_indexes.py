"""Indexes of single tars, next to the tar or in a folder of indexes."""

import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.interleaved import index_report
from data_prep.interleaved.index_report import Indexed
from src.errors import DataError
from src.files import reading, writing
from src.support.parsing import parse_json
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.manifest import Shard
from src.systems.interleaved.streaming.remote.transfer import PIPE, REMOTE, Source, source_of, transfer
from src.systems.interleaved.streaming.shard_lists import ShardSource
from src.systems.interleaved.streaming.tars.fields import Fields
from src.systems.interleaved.streaming.tars.image_files import MAX_PIXELS
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.texts import TextTokens, count_tokens


class Making(NamedTuple):
    """Options of making indexes."""

    verify: bool = False
    texts: TextTokens | None = None
    """Counts the tokens of texts; None: not counted."""
    fields: Fields | None = None
    max_pixels: int = MAX_PIXELS

    def lacks(self, index: tar_index.TarIndex) -> bool:
        """Whether an index was made with other options, and must be made again."""
        facts = index.facts
        return (
            (self.verify and not facts.get("verified"))
            or (self.texts is not None and facts.get("tokenizer") != self.texts.digest)
            or facts.get("fields") != (self.fields and self.fields.as_json())
            or facts["max_pixels"] != self.max_pixels
        )

    def build(self, content: memoryview, tar: str) -> tar_index.TarIndex:
        """Build the index of a tar. tar: its name, for error messages."""
        index = build(content, self.fields, self.max_pixels, self.verify)
        if self.texts:
            count_tokens(index, content, self.texts, tar)
        return index


PLAIN = Making()


def index_tar(tar: Path, how: Making) -> Indexed:
    """Write the index of a tar if it is missing.
    The index of a tar listed in shards.json is only replaced if it changes.

    Raises:
        DataError: the tar is unreadable, or it is verified and its hash differs from the one in shards.json.
    """
    index, is_verified = _load_index(tar), how.verify and _is_as_listed(tar)
    if index is None or how.lacks(index):
        before = index
        with tar_index.open_tar(tar) as content:
            index = how.build(content, str(tar))
        if (
            before is not None
            and is_verified
            and how.texts is None
            and before.documents["bad"].tolist() == index.documents["bad"].tolist()
        ):
            return index_report.summarize(tar, before)
        if before is not None and is_verified and how.texts is None:
            index.tokens, index.facts = before.tokens, before.facts | index.facts
        tar_index.save(index, tar)
    return index_report.summarize(tar, index)


def _is_as_listed(tar: Path) -> bool:
    """Whether shards.json in its folder lists the tar with a hash. Raises DataError if the hash differs."""
    if not (tar.parent / manifest.NAME).is_file():
        return False
    for shard in manifest.load(tar.parent).shards:
        if shard.url == tar.name and shard.sha256 is not None:
            with reading(tar, DataError), open(tar, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != shard.sha256:
                raise DataError(
                    f"{tar}: damaged or replaced: its sha256 is {digest[:16]}, but {manifest.NAME} lists "
                    f"{shard.sha256[:16]}. Download or write it again."
                )
            return True
    return False


def update_lists(tars: Sequence[Path]) -> None:
    """Update the digests of rewritten indexes in the shards.json of their folders."""
    for folder in sorted({tar.parent for tar in tars}):
        if (folder / manifest.NAME).is_file():
            before = manifest.load(folder)
            names = {
                tar.name
                for tar in tars
                if tar.parent == folder and tar.with_name(tar.name + tar_index.SUFFIX).is_file()
            }
            shards = [
                replace(
                    shard, index_digest=tar_index.digest_of(folder / shard.index), **_describe_local(folder / shard.url)
                )
                if shard.url in names and shard.index == shard.url + tar_index.SUFFIX
                else shard
                for shard in before.shards
            ]
            if shards != before.shards:
                manifest.save(replace(before, shards=shards))


def _load_index(tar: Path) -> tar_index.TarIndex | None:
    try:
        index = tar_index.load(tar)
    except DataError:
        return None
    return None if "cut" in index.facts or _is_newer(tar, tar) else index


def _describe_local(tar: Path) -> dict[str, Any]:
    """Fields of a `Shard` from which a reader detects that a local tar was replaced or changed."""
    return {"mtime_ns": tar.stat().st_mtime_ns, "sample": manifest.sample_tar(tar)}


def _is_newer(tar: Path, place: Path) -> bool:
    """Whether a tar was written, moved or copied to its path after its index was written.
    A copy can have an old modification time."""
    return tar.stat().st_ctime_ns > place.with_name(place.name + tar_index.SUFFIX).stat().st_mtime_ns


def index_listed(one: ShardSource, output: Path, how: Making) -> Indexed:
    """Write the index of a shard into a folder if it is missing."""
    is_file = not one.url.startswith(REMOTE)
    if is_file and not Path(one.url).is_file():
        raise DataError(f"{one.url}: no such file.")
    source = Source(one.url, Path(one.url).stat().st_size) if is_file else source_of(one.url)
    index = load_listed(output, one)
    is_current = index and (source.url.startswith(PIPE) or (index.facts["bytes"], index.facts["etag"]) == source[1:])
    is_current = is_current and not (is_file and _is_newer(Path(one.url), _place(output, one)))
    if index is None or not is_current or how.lacks(index):
        with tar_index.open_tar(Path(one.url)) if is_file else _fetch(source, output) as content:
            index = how.build(content, one.url)
            sha256 = None if is_file else hashlib.sha256(content).hexdigest()
        index.facts |= {"url": one.url, "etag": source.etag, "sha256": sha256}
        tar_index.save(index, _place(output, one))
    return index_report.summarize(one.url, index)


@contextmanager
def _fetch(source: Source, output: Path) -> Iterator[memoryview]:
    """Copy a remote shard into an unnamed temporary file; yield its bytes."""
    with writing(output), tempfile.TemporaryFile(dir=output, buffering=0) as file:
        transfer(source, file)
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as tar:
            yield tar


def _place(output: Path, one: ShardSource) -> Path:
    """Path of an index in the folder, without ".idx".
    Tars with the same name in different folders have different paths."""
    name = re.sub(r"[^\w.-]", "_", "pipe" if one.url.startswith(PIPE) else one.url.rpartition("/")[2])[-100:]
    return output / f"{name}-{hashlib.sha256(os.fsencode(one.url)).hexdigest()[:16]}"


def load_listed(output: Path, one: ShardSource) -> tar_index.TarIndex | None:
    """Load the index of a shard; None if it is not in the folder or incomplete."""
    place = _place(output, one)
    path = place.with_name(place.name + tar_index.SUFFIX)
    try:
        with open(path, "rb") as file:
            facts = parse_json(file.readlines(1 << 16)[1], path, DataError)
        index = tar_index.load_file(path, facts["bytes"], one.url)
    except (OSError, DataError, ValueError, LookupError):
        return None
    return index if index.facts.get("url") == one.url and "cut" not in index.facts else None


def describe(output: Path, one: ShardSource, index: tar_index.TarIndex) -> Shard:
    place, within, facts = _place(output, one), Path(one.url), index.facts
    url = str(within.relative_to(output.resolve())) if within.is_relative_to(output.resolve()) else one.url
    name = place.name + tar_index.SUFFIX
    local = {} if one.url.startswith(REMOTE) else _describe_local(within)
    digest = tar_index.digest_of(output / name)
    return Shard(url, name, len(index), facts["bytes"], one.source, facts["sha256"], facts["etag"], digest, **local)
