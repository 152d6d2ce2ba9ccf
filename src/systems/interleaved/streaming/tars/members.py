"""Read the members of a tar from its headers. Every member and every byte is accounted for.

Formats: V7, ustar, GNU (long names, sparse files, volumes), pax (POSIX.1-2001), and concatenated tars. Python's
`tarfile` accepts a file that ends between two members or inside a header as complete; here only two zero blocks end an
archive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

BLOCK = 512
_REGULAR = frozenset(b"0\0" + b"7")
_LONG_NAME, _LONG_LINK, _PAX, _SOLARIS_PAX, _PAX_GLOBAL, _SPARSE = b"LKxXgS"
_NO_DATA = frozenset(b"123456")
"""Links, devices, directories and fifos. No content follows, even if the header has a size."""
DIRECTORY = "a directory"
TRAILING = "bytes after the end of the archive"
_TYPES = {
    "1": "a hard link",
    "2": "a symbolic link",
    "3": "a character device",
    "4": "a block device",
    "5": DIRECTORY,
    "6": "a fifo",
    "S": "a sparse file",
    "V": "a volume label",
    "M": "the rest of a file of another volume",
    "D": "a list of a directory",
    "N": "a list of long names",
}
_ALONE = frozenset((DIRECTORY, TRAILING, *(_TYPES[kind] for kind in "VDN")))
"""Reasons for which a member belongs to no document."""
_MAGIC_NUMBERS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
    b"\x1f\x9d": "compress",
}
_UNPACKERS = {"gzip", "bzip2", "xz", "zstd", "lz4"}
"""Commands that unpack with -dc."""
_PREFIX, _MAGIC = slice(345, 500), slice(257, 263)
_AT_ONCE = 1 << 15
"""Headers checked per batch."""


class Cut(NamedTuple):
    """Why a tar cannot be read to its end."""

    reason: str
    end: int
    """Everything before this byte is intact."""
    advice: str = "Get it again."


class Lone(NamedTuple):
    """A member that belongs to no document."""

    name: str
    reason: str
    size: int


@dataclass
class Members:
    """The members of a tar that can be parts of documents, in order, up to a cut."""

    names: list[str] = field(default_factory=list)
    """Without a leading "./". Bytes that are not UTF-8 are surrogate escapes."""
    headers: list[int] = field(default_factory=list)
    """Byte offset of each member's first header."""
    data: list[int] = field(default_factory=list)
    """Byte offset of each member's content."""
    sizes: list[int] = field(default_factory=list)
    """Content size of each member in bytes."""
    reasons: list[str] = field(default_factory=list)
    """Why each member cannot be read, such as "a hard link"; "" for a regular file."""
    lone: list[Lone] = field(default_factory=list)
    cut: Cut | None = None


class _Entry(NamedTuple):
    begin: int
    """Byte offset of the first header, such as a long-name header."""
    header: int
    data: int
    size: int
    name: bytes | None
    """Name from a long-name or pax header; None: the member's own header has the name."""
    sparse: bool


class _Extension:
    """Headers that precede a member and describe it."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.name: bytes | None = None
        self.records = dict[bytes, bytes]()

    def read(self, kind: int, content: bytes) -> None:
        if kind == _LONG_NAME:
            self.name = content.rstrip(b"\0")
        elif kind in (_PAX, _SOLARIS_PAX):
            self.records.update(_pax_records(content))


def scan(tar: memoryview) -> Members:
    """Read the members of a tar, such as a memory map. Only headers are read."""
    import numpy as np

    compression = next((name for magic, name in _MAGIC_NUMBERS.items() if bytes(tar[: len(magic)]) == magic), None)
    if compression and not _is_header(tar, 0):
        return Members(
            cut=Cut(
                f"compressed with {compression}",
                0,
                'Unpack it, or give "pipe:COMMAND" that does'
                + (f", such as {compression} -dc FILE." if compression in _UNPACKERS else "."),
            )
        )
    entries, trailing, cut = _walk(tar)
    members = Members(cut=cut)
    blocks = np.frombuffer(tar, dtype=np.uint8, count=len(tar) // BLOCK * BLOCK).reshape(-1, BLOCK)
    for first in range(0, len(entries), _AT_ONCE):
        batch = entries[first : first + _AT_ONCE]
        headers = blocks[np.array([entry.header for entry in batch]) // BLOCK]
        wrong = np.flatnonzero(~_checksum_agrees(headers))
        kinds = headers[: wrong[0] if len(wrong) else None, 156].tolist()
        for entry, kind, own_name in zip(batch, kinds, _names(headers), strict=False):
            _add(members, entry, kind, own_name if entry.name is None else entry.name)
        if len(wrong):
            entry = batch[wrong[0]]
            members.cut = Cut(f"no tar header at byte {entry.header}", entry.begin)
            return members
    if trailing:
        members.lone.append(Lone("", TRAILING, trailing))
    return members


def _add(members: Members, entry: _Entry, kind: int, raw_name: bytes) -> None:
    name = raw_name.decode("utf-8", "surrogateescape").removeprefix("./")
    if kind in _REGULAR:
        reason = DIRECTORY if name.endswith("/") else "" if not entry.sparse else _TYPES["S"]
    else:
        reason = _TYPES.get(chr(kind), f"a member of type {chr(kind)!r}")
    if reason in _ALONE:
        members.lone.append(Lone(name, reason, entry.size))
        return
    members.names.append(name)
    members.headers.append(entry.begin)
    members.data.append(entry.data)
    members.sizes.append(entry.size)
    members.reasons.append(reason)


def _walk(tar: memoryview) -> tuple[list[_Entry], int, Cut | None]:
    """All members, the number of bytes after the end of the archive, and the cut, if any.

    Headers that only describe the next member are merged into it. Checksums of members are checked later, in batches.
    """
    entries = list[_Entry]()
    offset, total = 0, len(tar)
    extension: _Extension | None = None
    global_records = dict[bytes, bytes]()  # records of global pax headers
    while offset + BLOCK <= total:
        if not tar[offset] and not any(tar[offset : offset + BLOCK]):
            if offset + 2 * BLOCK > total or any(tar[offset + BLOCK : offset + 2 * BLOCK]):
                return entries, 0, Cut(f"cut in the end of the archive, at byte {offset}", offset)
            if extension:
                return entries, 0, Cut("cut after a long name", extension.begin)
            offset = _skip_zeros(tar, offset + 2 * BLOCK)
            if offset == total or not _is_header(tar, offset):
                return entries, total - offset, None
            continue  # another tar follows
        kind = tar[offset + 156]
        begin = extension.begin if extension else offset
        size = _size(tar, offset)
        if size is None or (kind not in _REGULAR and not _is_header(tar, offset)):
            return entries, 0, Cut(f"no tar header at byte {offset}", begin)
        data = offset + BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _SOLARIS_PAX, _PAX_GLOBAL):
            if data + size > total:
                return entries, 0, _cut_in_member(size, data, total, begin)
            content = bytes(tar[data : data + size])
            if kind == _PAX_GLOBAL:
                global_records.update(_pax_records(content))
            else:
                extension = extension or _Extension(offset)
                extension.read(kind, content)
            offset = data + _round_up(size)
            continue
        name, sparse = None, kind == _SPARSE
        if extension or global_records:
            records = {**global_records, **(extension.records if extension else {})}
            name = records.get(b"path", extension.name if extension else None)
            if any(key.startswith(b"GNU.sparse.") for key in records):
                name, sparse = records.get(b"GNU.sparse.name", name), True
            if records.get(b"size", b"").isdigit():
                size = int(records[b"size"])
        if kind == _SPARSE:
            data = _skip_sparse_map(tar, offset)
        if kind in _NO_DATA and size and (_is_header(tar, data) or not any(tar[data : data + BLOCK])):
            size = 0
        if data + size > total:
            return entries, 0, _cut_in_member(size, data, total, begin)
        entries.append(_Entry(begin, offset, data, size, name, sparse))
        offset, extension = data + _round_up(size), None
    if extension and offset >= total:
        return entries, 0, Cut("cut after a long name", extension.begin)
    where = "in a header" if offset < total else "between two members"
    return (
        entries,
        0,
        Cut(f"cut {where}: {total} bytes, and no end of archive", extension.begin if extension else min(offset, total)),
    )


def _cut_in_member(size: int, data: int, total: int, begin: int) -> Cut:
    return Cut(f"cut in a member of {size} bytes at byte {data}: {total} bytes", begin)


def _round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _size(tar: memoryview, at: int) -> int | None:
    try:
        size = int(bytes(tar[at + 124 : at + 135]), 8)
    except ValueError:
        size = _number(bytes(tar[at + 124 : at + 136]))
    return None if size is None or size < 0 else size


def _skip_zeros(tar: memoryview, at: int) -> int:
    """Offset of the next block with a nonzero byte, or the end of the file."""
    total, step = len(tar), 1 << 20
    while at < total:
        content = bytes(tar[at : at + step])
        rest = content.lstrip(b"\0")
        if rest:
            return at + (len(content) - len(rest)) // BLOCK * BLOCK
        at += len(content)
    return total


def _skip_sparse_map(tar: memoryview, header: int) -> int:
    """Offset after the map of an old GNU sparse file, which can span several blocks."""
    at, flag = header + BLOCK, header + 482
    while flag < len(tar) and tar[flag]:
        flag, at = at + 504, at + BLOCK
    return at


def _is_header(tar: memoryview, at: int) -> bool:
    """Whether a block has the checksum of a tar header."""
    import numpy as np

    block = tar[at : at + BLOCK]
    return len(block) == BLOCK and bool(_checksum_agrees(np.frombuffer(block, dtype=np.uint8)[None])[0])


def _checksum_agrees(headers: "np.ndarray") -> "np.ndarray":
    """(N,) bool: whether each checksum is right: the sum of the header's bytes, with blanks for the checksum."""
    import numpy as np

    sums = headers.sum(axis=1, dtype=np.int64) - headers[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    digits = headers[:, 148:154].astype(np.int64) - ord("0")
    checksums = digits @ 8 ** np.arange(5, -1, -1)
    good = (checksums == sums) & (digits >= 0).all(axis=1) & (digits < 8).all(axis=1)
    for place in np.flatnonzero(~good):  # another notation, signed bytes (old Sun tars), or wrong
        number = _number(headers[place, 148:156].tobytes())
        signed_sum = sums[place] - 256 * int((headers[place] > 127).sum() - (headers[place, 148:156] > 127).sum())
        good[place] = headers[place].any() and number in (sums[place], signed_sum)
    return good


def _names(headers: "np.ndarray") -> list[bytes]:
    import numpy as np

    names = np.ascontiguousarray(headers[:, :100]).view("S100").ravel().tolist()
    names = [name.partition(b"\0")[0] for name in names]
    for place in np.flatnonzero(headers[:, 345]):
        if headers[place, _MAGIC].tobytes() == b"ustar\0":
            names[place] = headers[place, _PREFIX].tobytes().partition(b"\0")[0] + b"/" + names[place]
    return names


def _number(text: bytes) -> int | None:
    """Parse a number field of tar: octal digits, or base 256 if the first bit is set. None if it is neither."""
    if text[:1] >= b"\x80":
        return int.from_bytes(bytes([text[0] & 0x7F]) + text[1:], "big")
    digits = text.partition(b"\0")[0].strip(b" ") or text.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def _pax_records(content: bytes) -> dict[bytes, bytes]:
    """Parse the records of a pax header, "LENGTH KEY=VALUE" with a line end each, up to a damaged one."""
    records, at = dict[bytes, bytes](), 0
    while at < len(content):
        digits, sign, _ = content[at : at + 20].partition(b" ")
        if not sign or not digits.isdigit() or int(digits) <= len(digits):
            break
        key, _, value = content[at + len(digits) + 1 : at + int(digits) - 1].partition(b"=")
        records[key] = value
        at += int(digits)
    return records


def split_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """Split each name at the first dot of its last path component into (key, ending)."""
    pairs = []
    for name in names:
        dot = name.find(".", name.rfind("/") + 1)
        pairs.append((name, "") if dot < 0 else (name[:dot], name[dot + 1 :]))
    return pairs
