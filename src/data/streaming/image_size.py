"""Width and height of an encoded image by its header: PNG and JPEG here, in microseconds; what else Pillow reads, by Pillow."""

import io
import struct
from collections.abc import Callable

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))
"""JPEG markers without a length: TEM and RST0 to RST7."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers that begin a frame, whose header has the size (ITU-T T.81, B.2.2)."""


def image_size(data: memoryview) -> tuple[int, int] | None:
    """Pixels of an image, width first; None where it is none."""
    for magic, read in _READERS:
        if bytes(data[: len(magic)]) == magic:
            return read(data)
    return _by_pillow(data)


def _png(data: memoryview) -> tuple[int, int] | None:
    return struct.unpack(">II", data[16:24]) if len(data) >= 24 else None


def _jpeg(data: memoryview) -> tuple[int, int] | None:
    at, size = 2, len(data)
    while at + 9 <= size:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
        elif marker in _FRAMES:
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        elif marker in _NO_LENGTH:
            at += 2
        else:
            at += 2 + struct.unpack(">H", data[at + 2 : at + 4])[0]
    return None


def _by_pillow(data: memoryview) -> tuple[int, int] | None:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


_READERS: tuple[tuple[bytes, Callable[[memoryview], tuple[int, int] | None]], ...] = ((_PNG, _png), (_JPEG, _jpeg))
