"""The members of a tar file by their headers alone, and every kind of cut that a tar can have.

Formats: ustar, GNU with long names, pax (POSIX.1-2001, "pax Interchange Format"). Python's `tarfile` takes a file that ends between two
members, or inside a header, for a whole one; here only two blocks of zeros end an archive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BLOCK = 512
_LONG_NAME, _PAX, _PAX_GLOBAL, _FILE, _OLD_FILE = b"Lxg0\0"
_PREFIX, _MAGIC = slice(345, 500), slice(257, 263)
_AT_ONCE = 1 << 15
"""Headers that are looked at together."""


@dataclass
class Members:
    """The regular files of a tar, in their order, up to where it is cut."""

    names: list[str]
    """Without "./" before them."""
    headers: list[int]
    """Bytes at which their first headers begin."""
    data: list[int]
    """Bytes at which their contents begin."""
    sizes: list[int]
    """Bytes of their contents."""
    cut: tuple[str, int] | None
    """Why the tar ends too early or is none, and up to which byte all is well; None where it is whole."""


def scan(tar: memoryview) -> Members:
    """The members of a tar, such as a memory map: only headers are read."""
    import numpy as np

    offsets, sizes, cut = _walk(tar)
    found = Members([], [], [], [], cut)
    blocks = np.frombuffer(tar, dtype=np.uint8, count=len(tar) // BLOCK * BLOCK).reshape(-1, BLOCK)
    begin, long_name = 0, None  # of a member with several headers
    for first in range(0, len(offsets), _AT_ONCE):
        own = offsets[first : first + _AT_ONCE]
        headers = blocks[np.array(own) // BLOCK]
        wrong = np.flatnonzero(~_checksum_agrees(headers))
        kinds = headers[: wrong[0] if len(wrong) else None, 156].tolist()
        names = _names(headers)
        for place, kind in enumerate(kinds):
            at, size = own[place], sizes[first + place]
            if kind == _LONG_NAME:
                long_name = bytes(tar[at + BLOCK : at + BLOCK + size]).rstrip(b"\0")
            elif kind == _PAX:
                long_name = _pax_path(bytes(tar[at + BLOCK : at + BLOCK + size])) or long_name
            elif kind != _PAX_GLOBAL:
                if kind in (_FILE, _OLD_FILE):
                    name = names[place] if long_name is None else long_name
                    found.names.append(name.decode("utf-8", "surrogateescape").removeprefix("./"))
                    found.headers.append(begin)
                    found.data.append(at + BLOCK)
                    found.sizes.append(size)
                begin, long_name = at + BLOCK + -(-size // BLOCK) * BLOCK, None
        if len(wrong):
            found.cut = f"no tar header at byte {own[wrong[0]]}", begin
            return found
    if long_name is not None and found.cut is None:
        found.cut = "cut behind a long name", begin
    if found.cut:
        found.cut = found.cut[0], min(begin, len(tar))
    return found


def _walk(tar: memoryview) -> tuple[list[int], list[int], tuple[str, int] | None]:
    """Bytes of all headers, sizes of what follows each, and why there is no end of the archive, if there is none."""
    offsets, sizes = list[int](), list[int]()
    at, total = 0, len(tar)
    while at + BLOCK <= total:
        if not tar[at] and not any(tar[at : at + BLOCK]):
            whole = at + 2 * BLOCK <= total and not any(tar[at + BLOCK : at + 2 * BLOCK])
            return offsets, sizes, None if whole else (f"cut in the end of the archive, at byte {at}", at)
        try:
            size = int(bytes(tar[at + 124 : at + 135]), 8)
        except ValueError:
            size = _number(bytes(tar[at + 124 : at + 136]))
        if size is None or size < 0:
            return offsets, sizes, (f"no tar header at byte {at}", at)
        if at + BLOCK + size > total:
            return offsets, sizes, (f"cut in a member of {size} bytes at byte {at + BLOCK}: {total} bytes", at)
        offsets.append(at)
        sizes.append(size)
        at += BLOCK + -(-size // BLOCK) * BLOCK
    where = "in a header" if at < total else "between two members"
    return offsets, sizes, (f"cut {where}: {total} bytes, and no end of archive", at)


def _checksum_agrees(headers: "np.ndarray") -> "np.ndarray":
    """(N,) whether each header has the checksum that it tells: the sum of its bytes, with blanks for the checksum's own."""
    import numpy as np

    sums = headers.sum(axis=1, dtype=np.int64) - headers[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    digits = headers[:, 148:154].astype(np.int64) - ord("0")
    told = digits @ 8 ** np.arange(5, -1, -1)
    good = (told == sums) & (digits >= 0).all(axis=1) & (digits < 8).all(axis=1)
    for place in np.flatnonzero(~good):  # written in another way, or wrong
        good[place] = _number(headers[place, 148:156].tobytes()) == sums[place]
    return good


def _names(headers: "np.ndarray") -> list[bytes]:
    import numpy as np

    names = np.ascontiguousarray(headers[:, :100]).view("S100").ravel().tolist()
    for place in np.flatnonzero(headers[:, 345]):
        if headers[place, _MAGIC].tobytes() == b"ustar\0":
            names[place] = headers[place, _PREFIX].tobytes().rstrip(b"\0") + b"/" + names[place]
    return names


def _number(field: bytes) -> int | None:
    """A number as tar writes it: octal digits, or base 256 where the first bit is set. None where it is neither."""
    if field[:1] >= b"\x80":
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def _pax_path(records: bytes) -> bytes | None:
    """The path among pax records, which are "LENGTH KEY=VALUE" and a line end each."""
    found, at = None, 0
    while at < len(records):
        digits, sign, _ = records[at:].partition(b" ")
        if not sign or not digits.isdigit() or int(digits) <= len(digits):
            return found
        key, _, value = records[at + len(digits) + 1 : at + int(digits) - 1].partition(b"=")
        found = value if key == b"path" else found
        at += int(digits)
    return found


def split_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """(Key, ending) of each name: what stands before and behind the first dot of its last part."""
    found = []
    for name in names:
        dot = name.find(".", name.rfind("/") + 1)
        found.append((name, "") if dot < 0 else (name[:dot], name[dot + 1 :]))
    return found
