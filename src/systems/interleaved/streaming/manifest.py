"""List of the tars of a data set: shards.json in a prepared folder, next to an index of each tar.

The tars can be anywhere. Packing and ordering need only the folder, not the tars.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from src import files
from src.data.jsonl import preparation_hint
from src.errors import DataError
from src.experiments.config import Config as StrictConfig
from src.systems.interleaved.streaming.tars.fields import MESSAGES, Fields

NAME = "shards.json"
_SAMPLED = 512
"""Maximum number of sampled tars, and of samples in total."""


class ShardError(DataError):
    """A shard cannot be read, and so none of its documents."""


class ShardUnavailable(ShardError):
    """A network, server or disk failed; the shard can become available later."""


class ChangedShardError(ShardError):
    """The shard's size, ETag or hash changed since it was indexed."""


@dataclass(frozen=True)
class Shard:
    """A tar of documents."""

    url: str
    """A path, relative to the list's folder or absolute; "s3://bucket/key"; or "pipe:COMMAND"."""
    index: str
    """Path of the index, relative to the folder."""
    documents: int
    bytes: int
    source: str = ""
    """Source name for counts, such as "captions"."""
    sha256: str | None = None
    etag: str | None = None
    """ETag of a remote object when it was indexed."""
    index_digest: str | None = None
    """Digest of the index."""
    mtime_ns: int | None = None
    """Modification time of a local tar when it was indexed.
    None for tars written by this project, which are older than their index."""
    sample: str | None = None
    """`sample_tar` of a local tar when it was indexed; checked if the modification time differs."""


@dataclass(frozen=True)
class Manifest:
    """Ordered tars of one split of a data set."""

    folder: Path
    shards: Sequence[Shard]
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about their creation, such as the shuffle seed."""

    @property
    def documents(self) -> int:
        """Number of documents in all tars."""
        return sum(shard.documents for shard in self.shards)


class SourceConfig(StrictConfig):
    """A source of documents."""

    path: str = Field(min_length=1)
    """Folder below `--data_path`, with the lists of shards train/shards.json and val/shards.json."""
    rate: float | None = Field(default=None, gt=0)
    """Sampling weight of the source; rates need not sum to 1.
    None, for all sources: an epoch reads each document once."""
    fields: Fields | None = None
    """Members by kind; must equal the --fields of the index. None: use those of the index."""
    loss_weight: float = Field(default=1.0, gt=0)
    """Weight of the loss of each token of this source."""
    chat: bool = False
    """Write documents with the tokenizer's chat template: images and prompts are the user's, texts the assistant's.
    Loss only on the assistant's."""

    def check(self, name: str, shard_list: Manifest) -> None:
        """Raises DataError if the tars were indexed with another mapping, or `chat` does not fit them. name: of the
        source."""
        indexed = shard_list.facts.get("fields")
        if self.fields is not None and self.fields.as_json() != indexed:
            options = f"--fields '{json.dumps(self.fields.as_json())}'"
            raise DataError(
                f"data.sources.{name}.fields: the tars in {shard_list.folder} were indexed with "
                f"{json.dumps(indexed or {})}. Index them again with {options}, or set fields to that."
            )
        if MESSAGES in (indexed or {}) and not self.chat:
            raise DataError(
                f"data.sources.{name}.chat: false, but the documents in {shard_list.folder} are conversations. "
                "Set it to true."
            )


def load(folder: Path) -> Manifest:
    """Load the list in a folder.

    Raises:
        DataError: it is missing or malformed.
    """
    path = folder / NAME
    advice = preparation_hint(folder) or (
        "Make it with python -m data_prep.interleaved.index, or write the tars with this project."
    )
    if not path.is_file():
        raise DataError(f"{path}: no such file. {advice}")
    raw = files.read_json(path, DataError)
    try:
        shards = [_check(Shard(**shard)) for shard in raw["shards"]]
        facts = dict(raw["facts"])
        urls = [shard.url for shard in shards]
        if len(set(urls)) < len(urls):
            raise ValueError(f"duplicate shard {next(url for url in urls if urls.count(url) > 1)}")
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"{path}: not a list of shards ({error}). {advice}") from None
    if not any(shard.documents for shard in shards):
        raise DataError(f"{path}: lists no documents. {advice}")
    return Manifest(folder, shards, facts)


def _check(shard: Shard) -> Shard:
    texts = (
        shard.url,
        shard.index,
        shard.source,
        shard.sha256 or "",
        shard.etag or "",
        shard.index_digest or "",
        shard.sample or "",
    )
    if not all(isinstance(text, str) for text in texts) or not shard.url:
        raise ValueError(f"shard {str(shard.url)[:80]!r}: expected texts for its url, index, source and digests")
    if type(shard.documents) is not int or type(shard.bytes) is not int or shard.documents < 0 or shard.bytes < 0:
        raise ValueError(
            f"{shard.url}: expected numbers of documents and bytes, got {shard.documents!r} and {shard.bytes!r}"
        )
    return shard


def sample_tar(path: Path) -> str:
    """Digest of samples of a local tar, or of all its bytes if it is below 128 KiB."""
    with files.reading(path, DataError):
        return files.sample_digest(path, edge=1 << 16, pieces=16)


def sample_digest(manifest: Manifest) -> str:
    """Digest of samples of the local tars, or of a subset if there are many, to detect changes in place.

    Raises:
        DataError: a tar cannot be read.
    """
    local = [path for shard in manifest.shards if (path := manifest.folder / shard.url).is_file()]
    samples = []
    for path in local[:: -(-len(local) // _SAMPLED) or 1]:
        with files.reading(path, DataError):
            samples.append([path.name, files.sample_digest(path, edge=4096, pieces=max(4, _SAMPLED // len(local)))])
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()


def save(manifest: Manifest) -> None:
    """Write the list into its folder.

    Raises:
        RunError: the disk refuses.
    """
    shards = [{name: value for name, value in asdict(shard).items() if value is not None} for shard in manifest.shards]
    files.write_json(manifest.folder / NAME, {"shards": shards, "facts": manifest.facts})
