"""The index of a tar of documents: where each document and each of its parts is, so that any can be read alone.

A document is a run of members whose names begin with one key. Its parts are named KEY.POSITION.KIND.EXTENSION, such as 7_ab.0.text.txt, or
KEY.EXTENSION and KEY.KIND.EXTENSION where each kind is there once. KEY.metadata.txt lists the names of all parts of the document
(huggingface/smollm, vision/m4): by it a document is known to be whole.
"""

import hashlib
import io
import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from src.data.streaming.image_size import image_size
from src.data.streaming.tar_members import Members, scan, split_names
from src.errors import DataError
from src.files import reading, write_atomic

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".idx"
_MAGIC, _FORMAT = b"tar index\n", 2
KINDS = ("text", "image", "metadata", "other", "prompt")
TEXT, IMAGE, METADATA, OTHER, PROMPT = range(len(KINDS))
"""A prompt is text that a model reads, and does not learn to write."""
_KIND_OF = {"txt": TEXT, "text": TEXT, "caption": TEXT, "image": IMAGE, "metadata": METADATA}
_KIND_OF |= {"prompt": PROMPT, "question": PROMPT, "answer": TEXT}
_KIND_OF |= dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp"), IMAGE)
_ORDER = {IMAGE: 0, PROMPT: 1, TEXT: 2}
_UNNUMBERED = 1 << 24
DOCUMENT = [("offset", "<u8"), ("first_part", "<u4"), ("parts", "<u2"), ("images", "<u2"), ("text_bytes", "<u4"), ("bad", "u1")]
PART = [("position", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("kind", "u1"), ("width", "<u4"), ("height", "<u4")]
REASONS = ("", "incomplete", "a part is there twice", "its parts are not together", "it has no key", "an image cannot be decoded")
"""Why a document is bad, by its number in the index."""
GOOD, INCOMPLETE, TWICE, APART, NO_KEY, NO_IMAGE = range(len(REASONS))


@dataclass
class TarIndex:
    """What is known of a tar without reading its documents again."""

    documents: "np.ndarray"
    """A record of each, as `DOCUMENT` says: the byte of its first header, its parts, and why it is bad (0: it is good)."""
    parts: "np.ndarray"
    """A record of each, as `PART` says: those of a document are together, by position."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the file: "bytes"; "cut", why it ends too early and up to which byte it is whole; "verified", whether its images were decoded;
    "tokenizer", the digest of the tokenizer that `tokens` are of."""
    tokens: "np.ndarray | None" = None
    """(parts,) uint32: tokens of each text, 0 for one that is left out and for all else. None where they were not counted."""

    def __len__(self) -> int:
        return len(self.documents)

    def parts_of(self, document: int) -> "np.ndarray":
        """The records of a document's parts, by position."""
        row = self.documents[document]
        return self.parts[row["first_part"] : row["first_part"] + row["parts"]]


class _Part(NamedTuple):
    position: int
    data: int
    size: int
    kind: int


@contextmanager
def open_tar(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, mapped.

    Raises:
        DataError: it cannot be read.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    with reading(path, DataError), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as tar:
            yield tar


@lru_cache(4096)
def kind_and_position(ending: str) -> tuple[int, int | None]:
    """Of a member, by its name behind the key; no position where its kind is there once."""
    first, *rest = ending.split(".")
    if len(rest) == 2 and first.isascii() and first.isdigit() and len(first) < 7:
        return _KIND_OF.get(rest[0], OTHER), int(first)
    return _KIND_OF.get(first.lower(), OTHER), None


def build(tar: memoryview) -> TarIndex:
    """The index of a tar by its headers. Of one that is cut it has the documents before the cut."""
    members = scan(tar)
    named = split_names(members.names)
    begins = [i for i in range(len(named)) if not i or named[i][0] != named[i - 1][0]]
    runs = Counter(named[begin][0] for begin in begins)
    documents, parts = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for begin, end in pairwise([*begins, len(named)]):
        own = list[_Part]()
        for number in range(begin, end):
            kind, position = kind_and_position(named[number][1])
            if position is None:  # what has no number comes last; of it images, then what is asked, then what is said
                position = _UNNUMBERED + _ORDER.get(kind, 3) * _UNNUMBERED + number - begin
            own.append(_Part(position, members.data[number], members.sizes[number], kind))
        key, last = named[begin][0], members.cut is not None and end == len(named)
        bad = NO_KEY if not key.rpartition("/")[2] else APART if runs[key] > 1 else _defect(own, members, begin, tar, last)
        first, images, text_bytes = len(parts), 0, 0
        for part in sorted(own):
            size = (0, 0)
            if part.kind == IMAGE:
                images += 1
                size = image_size(tar[part.data : part.data + part.size]) or size
                bad = bad or (NO_IMAGE if 0 in size else GOOD)
            elif part.kind in (TEXT, PROMPT):
                text_bytes += part.size
            parts.append((*part, *size))
        documents.append((members.headers[begin], first, end - begin, images, text_bytes, bad))
    facts = {"bytes": len(tar), **({"cut": list(members.cut)} if members.cut else {})}
    return TarIndex(_records(DOCUMENT, documents), _records(PART, parts), facts)


def _defect(own: Sequence[_Part], members: Members, begin: int, tar: memoryview, last_before_cut: bool) -> int:
    """Number in REASONS of what is wrong with a document by its names."""
    if len({(part.kind == METADATA, part.position) for part in own}) < len(own):
        return TWICE
    names, listed = members.names[begin : begin + len(own)], [part for part in own if part.kind == METADATA]
    if listed and bytes(tar[listed[0].data : listed[0].data + listed[0].size]) == "\n".join(names[:-1]).encode("utf-8", "surrogateescape"):
        return GOOD  # as this project writes it
    endings = {name.rpartition("/")[2] for name in names}
    if not listed:
        numbered = any(kind_and_position(name.partition(".")[2])[1] is not None for name in endings)
        return INCOMPLETE if numbered or last_before_cut else GOOD
    text = bytes(tar[listed[0].data : listed[0].data + listed[0].size]).decode("utf-8", "surrogateescape")
    wanted = {name.rpartition("/")[2] for name in text.splitlines() if name}
    return GOOD if wanted <= endings else INCOMPLETE


def _records(fields: Sequence[tuple[str, str]], rows: Sequence[tuple[int, ...]]) -> "np.ndarray":
    import numpy as np

    found = np.empty(len(rows), dtype=list(fields))
    for (name, _), column in zip(fields, zip(*rows, strict=True), strict=False):
        found[name] = column
    return found


def verify(index: TarIndex, tar: memoryview) -> None:
    """Decode each image once; documents with one that cannot be, or that is cut off, become bad."""
    from PIL import Image

    for number in range(len(index)):
        for part in index.parts_of(number):
            if part["kind"] == IMAGE and not index.documents["bad"][number]:
                try:
                    with Image.open(io.BytesIO(tar[int(part["offset"]) : int(part["offset"]) + int(part["size"])])) as image:
                        image.load()
                except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
                    index.documents["bad"][number] = NO_IMAGE
    index.facts["verified"] = True


def save(index: TarIndex, tar: Path) -> Path:
    """Write the index of a tar as FILE.idx, for one that is beside it; returns the path.

    Raises:
        RunError: the disk refuses.
    """
    import numpy as np

    out = io.BytesIO()
    out.write(_MAGIC + json.dumps({"format": _FORMAT, **index.facts}).encode() + b"\n")
    for array in (index.documents, index.parts, *(() if index.tokens is None else (index.tokens,))):
        np.save(out, array, allow_pickle=False)
    path = tar.with_name(tar.name + SUFFIX)
    write_atomic(path, out.getvalue() + hashlib.sha256(out.getvalue()).digest())
    return path


def load(tar: Path) -> TarIndex:
    """The index beside a tar.

    Raises:
        DataError: it is missing, damaged, or of a file of another size.
    """
    path = tar.with_name(tar.name + SUFFIX)
    with reading(tar, DataError):
        if not tar.exists():
            raise DataError(f"{tar}: no such file.")
        return load_file(path, tar.stat().st_size, tar.name)


def digest_of(path: Path) -> str:
    """Hex digest of a whole index, which stands at its end.

    Raises:
        DataError: it cannot be read.
    """
    with reading(path, DataError), open(path, "rb") as file:
        file.seek(-32, os.SEEK_END)
        return file.read().hex()


def load_file(path: Path, size: int, tar: str, wanted: str | None = None) -> TarIndex:
    """An index. size: bytes of the tar that it should be of, which is called `tar` in errors. wanted: its digest, where that is known.

    Raises:
        DataError: it is missing, damaged, of a file of another size, or not the one that is wanted.
    """
    import numpy as np

    again = f"Make it with python -m data_prep.tar_shards.index {tar}"
    try:
        with reading(path, DataError):
            content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. {again}") from None
    content, digest = content[:-32], content[-32:]
    if not content.startswith(_MAGIC) or hashlib.sha256(content).digest() != digest:
        raise DataError(f"{path}: damaged, or no index. {again}")
    if wanted is not None and digest.hex() != wanted:
        raise DataError(f"{path}: not the index that shards.json lists; rows would be others. Restore it, or make both anew.")
    read = io.BytesIO(content[len(_MAGIC) :])
    facts = json.loads(read.readline())
    if facts.pop("format") != _FORMAT:
        raise DataError(f"{path}: of another version of this project. {again}")
    if facts["bytes"] != size:
        raise DataError(f"{path}: of a tar of {facts['bytes']} bytes, and {tar} has {size}. {again}")
    documents, parts, *tokens = (np.load(read, allow_pickle=False) for _ in range(3 if "tokenizer" in facts else 2))
    return TarIndex(documents, parts, facts, *tokens)
