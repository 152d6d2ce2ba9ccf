"""Index of a tar of documents: byte offsets of each document and its parts, for random access.

A document is a sequence of members with names that start with the same key. Its parts are named
KEY.POSITION.KIND.EXTENSION, such as 7_ab.0.text.txt, KEY.POSITION.EXTENSION, KEY.EXTENSION or KEY.KIND.EXTENSION; a
mapping (`tars.fields`) can name more. KEY.metadata.txt lists the names of all parts, which shows that the document is
complete (huggingface/smollm, vision/m4). The index also counts the members that are not read.
"""

import hashlib
import io
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import DataError
from src.files import reading, write_atomic
from src.support.parsing import parse_json
from src.systems.interleaved.streaming.tars.fields import Fields
from src.systems.interleaved.streaming.tars.image_files import MAX_PIXELS, SUFFIXES, TOO_LARGE, UNDECODABLE

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".idx"
_MAGIC, _FORMAT = b"tar index\n", 3
KINDS = ("text", "image", "metadata", "other", "prompt", "system")
TEXT, IMAGE, METADATA, OTHER, PROMPT, SYSTEM = range(len(KINDS))
"""Kinds by number. A prompt is text that a model reads without loss; so is the system message of a conversation."""
TEXTS = (TEXT, PROMPT, SYSTEM)
_KIND_OF = {"txt": TEXT, "text": TEXT, "caption": TEXT, "image": IMAGE, "metadata": METADATA}
_KIND_OF |= {"prompt": PROMPT, "question": PROMPT, "answer": TEXT, "system": SYSTEM}
_KIND_OF |= dict.fromkeys(SUFFIXES, IMAGE)
_FILE_SUFFIXES = {"txt", *SUFFIXES}
DOCUMENT = [("offset", "<u8"), ("first_part", "<u4"), ("parts", "<u4"), ("images", "<u4"), ("bad", "u1")]
PART = [
    ("position", "<u4"),
    ("offset", "<u8"),
    ("size", "<u8"),
    ("kind", "u1"),
    ("pick", "<u4"),
    ("width", "<u4"),
    ("height", "<u4"),
]
REASONS = (
    "",
    "incomplete",
    "a part is there twice",
    "its parts are not together",
    UNDECODABLE,
    TOO_LARGE,
    "it has no text",
    "a text is not UTF-8",
    "its JSON does not have the mapped fields",
    "its messages are not a conversation that ends with an answer",
    "its messages have other images than the tar",
    "none of its images is in the tar",
)
"""Why a document is bad, by its number in the index."""
(
    GOOD,
    INCOMPLETE,
    TWICE,
    APART,
    NO_IMAGE,
    TOO_MANY_PIXELS,
    NO_TEXT,
    NOT_UTF8,
    NO_FIELDS,
    NO_CHAT,
    OTHER_IMAGES,
    LOST_IMAGES,
) = range(len(REASONS))


@dataclass
class TarIndex:
    """Documents and parts of a tar, without their contents."""

    documents: "np.ndarray"
    """A record per document, see `DOCUMENT`: offset of its first header, its parts, and its defect (0: none)."""
    parts: "np.ndarray"
    """A record per part, see `PART`. Parts of a document are contiguous, sorted by position."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the tar:

    - "bytes"; "members": their number; "cut": [reason, end of the intact part, advice] if the tar is cut
    - "read": [members, bytes] of good documents; "passed_over": {reason: {suffix: [members, bytes]}} of all other
      members (a suffix with a colon counts values of JSON members)
    - "fields": the mapping; "mapped": number of documents with each of its entries; "problems": [first error in JSON]
    - "max_pixels": the limit per image; "verified": true if all images were decoded; "tokenizer": digest of the
      tokenizer of `tokens`
    """
    tokens: "np.ndarray | None" = None
    """(parts,) uint32: token counts of texts; 0 for dropped texts and other parts. None if not counted."""

    def __len__(self) -> int:
        return len(self.documents)

    def parts_of(self, document: int) -> "np.ndarray":
        """The records of a document's parts, sorted by position."""
        row = self.documents[document]
        return self.parts[row["first_part"] : row["first_part"] + row["parts"]]

    @property
    def max_pixels(self) -> int:
        """Images with more pixels are not decoded."""
        return self.facts.get("max_pixels", MAX_PIXELS)

    @cached_property
    def fields(self) -> Fields | None:
        """The mapping of members that the index was built with."""
        return Fields.model_validate(self.facts["fields"]) if self.facts.get("fields") else None

    def contents(
        self, parts: "np.ndarray", read: Callable[[int, int], bytes], kinds: Sequence[int] = (*TEXTS, IMAGE)
    ) -> list[bytes]:
        """The contents of parts of these kinds, b"" for other parts.
        read: function from offset and size to bytes of the tar.

        Raises:
            DataError: a mapped value is missing from a JSON member.
        """
        records = zip(*(parts[name].tolist() for name in ("kind", "offset", "size", "pick")), strict=True)
        return contents_of(self.fields, records, read, kinds)


def contents_of(
    fields: Fields | None,
    parts: Iterable[tuple[int, int, int, int]],
    read: Callable[[int, int], bytes],
    kinds: Sequence[int],
) -> list[bytes]:
    """See `TarIndex.contents`. parts: (kind, offset, size, pick)."""
    contents, picks = list[bytes](), dict[tuple[int, int], list[tuple[int, int]]]()
    for place, (kind, offset, size, pick) in enumerate(parts):
        contents.append(read(offset, size) if kind in kinds and not pick else b"")
        if kind in kinds and pick:
            picks.setdefault((offset, size), []).append((place, pick))
    for member, places in picks.items():
        assert fields is not None, "only a mapping picks values"
        values = fields.read(read(*member), [pick for _, pick in places])
        for (place, _), value in zip(places, values, strict=True):
            contents[place] = value
    return contents


@contextmanager
def open_tar(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, memory-mapped.

    Raises:
        DataError: it cannot be read.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    with reading(path, DataError), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as tar:
            yield tar


@lru_cache(4096)
def kind_and_position(ending: str) -> tuple[int, int | None]:
    """Kind and position of a member from its name after the key. position: None for a name without a number."""
    first, *rest = ending.lower().split(".")
    if rest and len(rest) < 3 and first.isascii() and first.isdigit() and len(first) < 7:
        return _kind(rest), int(first)
    return _kind([first, *rest]), None


def _kind(names: Sequence[str]) -> int:
    """Kind of "KIND.SUFFIX", "SUFFIX", or the name of a file with a suffix, such as "jpg.json" for facts about it."""
    return _KIND_OF.get(names[-1 if names[0] in _FILE_SUFFIXES else 0], OTHER)


def save(index: TarIndex, tar: Path) -> Path:
    """Write the index of a tar as FILE.idx in the folder of the tar; returns the path.

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
    """Load the index FILE.idx of a tar.

    Raises:
        DataError: it is missing or damaged, or the size of the tar differs.
    """
    path = tar.with_name(tar.name + SUFFIX)
    with reading(tar, DataError):
        if not tar.exists():
            raise DataError(f"{tar}: no such file.")
        return load_file(path, tar.stat().st_size, tar.name)


def digest_of(path: Path) -> str:
    """Hex digest at the end of an index file.

    Raises:
        DataError: it cannot be read.
    """
    with reading(path, DataError), open(path, "rb") as file:
        file.seek(-32, os.SEEK_END)
        return file.read().hex()


def load_file(path: Path, size: int, tar: str, expected: str | None = None) -> TarIndex:
    """Load an index. size: bytes of its tar, which is called `tar` in errors. expected: digest of the index, if known.

    Raises:
        DataError: it is missing or damaged, the size of the tar differs, or its digest is not `expected`.
    """
    import numpy as np

    advice = f"Make it with python -m data_prep.interleaved.index {tar}"
    try:
        with reading(path, DataError):
            content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. {advice}") from None
    content, digest = content[:-32], content[-32:]
    if not content.startswith(_MAGIC) or hashlib.sha256(content).digest() != digest:
        raise DataError(f"{path}: damaged, or not an index. {advice}")
    if expected is not None and digest.hex() != expected:
        raise DataError(
            f"{path}: not the index that shards.json lists, so rows would differ. Restore it, or make both again "
            "with python -m data_prep.interleaved.index."
        )
    read = io.BytesIO(content[len(_MAGIC) :])
    facts = parse_json(read.readline(), str(path), DataError)
    if facts.pop("format") != _FORMAT:
        raise DataError(f"{path}: written by another version of this project. {advice}")
    if facts["bytes"] != size:
        raise DataError(f"{path}: made for a tar of {facts['bytes']} bytes, but {tar} has {size}. {advice}")
    documents, parts, *tokens = (np.load(read, allow_pickle=False) for _ in range(3 if "tokenizer" in facts else 2))
    return TarIndex(documents, parts, facts, *tokens)
