"""Write tars of documents with indexes and shards.json. Bytes are reproducible, also after interruptions.

The members of a document are adjacent in a tar, in the order of their names, and its last member lists them. A folder
is complete once it has shards.json; an interrupted command resumes if it is run with the same inputs.
"""

import contextlib
import hashlib
import io
import itertools
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_prep import command
from src import files
from src.data.orders import feistel_permute
from src.errors import DataError
from src.support.command_line import require_at_least
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.manifest import Manifest, Shard
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.tars.members import BLOCK
from src.systems.interleaved.streaming.texts import TextTokens, count_tokens

_PROGRESS, _SPOOL = "writing.json", "in_order"
_END = 2 * BLOCK
"""Number of zero bytes at the end of an archive."""
ENDINGS = {"text": "txt", "prompt": "txt", "system": "txt", "image": "jpeg"}


class Part(NamedTuple):
    """A part of a document."""

    kind: Literal["text", "prompt", "image", "system"]
    """prompt: text that is masked in the loss. system: the system message of a conversation."""
    content: bytes
    ending: str = ""
    """Suffix of the file, such as "png"; "" for the default of the kind."""


class Document(NamedTuple):
    """Document to write as consecutive members of a tar."""

    key: str
    """Unique in a tar, without dots, slashes and line ends."""
    parts: Sequence[Part]


@dataclass(frozen=True)
class Writing:
    """Options of writing tars."""

    per_shard: int = 1000
    """Documents per tar."""
    source: str = ""
    """Name of the source in the counts of training."""
    seed: int | None = None
    """Seed of the permutation of all documents; None: not permuted."""
    texts: TextTokens | None = None
    """Counts the tokens of texts for the indexes; None: not counted."""

    def __post_init__(self) -> None:
        require_at_least(1, per_shard=self.per_shard)


def write(folder: Path, documents: Iterable[Document], made_from: Mapping[str, Any], how: Writing) -> Manifest:
    """Write documents into `folder`; they can be larger than memory.
    made_from: JSON values on which their content depends.

    With a seed, documents are first written to a temporary folder, then copied in the permuted order.

    Raises:
        DataError: there is no document, one cannot be written, or the folder has other content.
        RunError: the disk refuses.
    """
    made_from = {**made_from, "per_shard": how.per_shard, "seed": how.seed, "source": how.source}
    if how.texts:
        made_from["tokenizer"] = how.texts.digest
    with command.exclusive_lock(folder, f"{folder}: another process writes it."):
        if done := _begin(folder, made_from):
            return done
        if how.seed is None:
            shards = _write_shards(folder, map(encode, documents), how)
        else:
            shards = _write_permuted(folder, documents, how, how.seed)
        if not shards:
            raise DataError(f"{folder}: there is no document to write. Check that the input is not empty.")
        new_manifest = Manifest(folder, shards, made_from)
        manifest.save(new_manifest)
        shutil.rmtree(folder / _SPOOL, ignore_errors=True)
        (folder / _PROGRESS).unlink(missing_ok=True)
    return new_manifest


def _begin(folder: Path, made_from: Mapping[str, Any]) -> Manifest | None:
    """Prepare a folder; return its manifest if it is already complete."""
    progress = files.read_json(folder / _PROGRESS, DataError) if (folder / _PROGRESS).exists() else None
    complete = manifest.load(folder) if (folder / manifest.NAME).exists() else None
    before = complete.facts if complete else progress
    if before is None and folder.is_dir() and any(path.suffix in (".tar", ".idx") for path in folder.iterdir()):
        raise DataError(
            f"{folder}: contains tars, but neither shards.json nor writing.json. Choose another folder, or delete it."
        )
    if before is not None and before != made_from:
        changed = sorted(key for key in {*before, *made_from} if before.get(key) != made_from.get(key))
        raise DataError(
            f"{folder}: was written with other input or settings ({', '.join(changed)} changed). "
            "Choose another folder, or delete it."
        )
    if complete is None:
        files.write_json(folder / _PROGRESS, dict(made_from))
    return complete


def _write_permuted(folder: Path, documents: Iterable[Document], how: Writing, seed: int) -> list[Shard]:
    """Write the documents in order to a temporary folder, then copy them in the permuted order."""
    spool = folder / _SPOOL
    spool.mkdir(exist_ok=True)
    if (spool / manifest.NAME).exists():
        spool_manifest = manifest.load(spool)
    else:
        spool_manifest = Manifest(spool, _write_shards(spool, map(encode, documents), Writing(how.per_shard)))
        if not spool_manifest.shards:
            return []
        manifest.save(spool_manifest)
    count = spool_manifest.documents
    with contextlib.ExitStack() as stack:
        tars = [stack.enter_context(tar_index.open_tar(spool / shard.url)) for shard in spool_manifest.shards]
        begins = [tar_index.load(spool / shard.url).documents["offset"].tolist() for shard in spool_manifest.shards]

        def members(number: int) -> bytes:
            shard, place = divmod(number, how.per_shard)
            end = begins[shard][place + 1] if place + 1 < len(begins[shard]) else len(tars[shard]) - _END
            return bytes(tars[shard][begins[shard][place] : end])

        return _write_shards(folder, (members(feistel_permute(i, count, f"write/{seed}")) for i in range(count)), how)


def _write_shards(folder: Path, documents: Iterable[bytes], how: Writing) -> list[Shard]:
    """Write encoded documents as tars with indexes. Existing tars with the same content are skipped."""
    shards, stream = list[Shard](), iter(documents)
    for number in itertools.count():
        path = folder / f"shard-{number:05}.tar"
        batch = list(itertools.islice(stream, how.per_shard))
        if not batch:
            return shards
        content = b"".join(batch) + b"\0" * _END
        indexed, digest = path.with_name(path.name + tar_index.SUFFIX), hashlib.sha256(content).hexdigest()
        if not (indexed.is_file() and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest):
            index = _index(content, len(batch), how)
            files.write_atomic(path, content)
            tar_index.save(index, path)
        digests = digest, None, tar_index.digest_of(indexed), None, manifest.sample_tar(path)
        shards.append(Shard(path.name, indexed.name, len(batch), len(content), how.source, *digests))
    raise AssertionError("an endless count")


def _index(content: bytes, documents: int, how: Writing) -> tar_index.TarIndex:
    tar = memoryview(content)
    index = build(tar)
    bad = index.documents["bad"].tolist()
    wrong = [
        (place, tar_index.REASONS[reason])
        for place, reason in enumerate(bad)
        if reason not in (tar_index.GOOD, tar_index.NO_TEXT)
    ]
    if wrong or len(index) != documents:
        problem = (
            f"document {wrong[0][0]} of a tar: {wrong[0][1]}" if wrong else "two adjacent documents have the same key"
        )
        raise DataError(
            f"documents: cannot write them: {problem}. "
            "Give each document a unique key, texts in UTF-8 and images that can be decoded."
        )
    if how.texts:
        count_tokens(index, tar, how.texts)
    return index


def encode(document: Document) -> bytes:
    """Encode a document as tar members, plus a last member that lists them.

    Raises:
        DataError: the key has a dot or a slash, or the document has no parts.
    """
    key, parts = document
    if not key or set(key) & set("./\n\r\0") or not parts:
        raise DataError(
            f"document {key!r}: expected a key without dots, slashes and line ends, and at least one part; got "
            f"{len(parts)} parts."
        )
    if strange := [part.ending for part in parts if not (part.ending or "x").isalnum()]:
        raise DataError(f'document {key!r}: expected a file extension, such as "png", got {strange[0]!r}.')
    width = max(3, len(str(len(parts) - 1)))
    names = [f"{key}.{i:0{width}}.{part.kind}.{part.ending or ENDINGS[part.kind]}" for i, part in enumerate(parts)]
    contents = [*(part.content for part in parts), "\n".join(names).encode()]
    out = io.BytesIO()
    for name, content in zip([*names, f"{key}.metadata.txt"], contents, strict=True):
        info = tarfile.TarInfo(name)
        info.size = len(content)
        out.write(info.tobuf(tarfile.GNU_FORMAT))
        out.write(content)
        out.write(b"\0" * (-len(content) % BLOCK))
    return out.getvalue()
