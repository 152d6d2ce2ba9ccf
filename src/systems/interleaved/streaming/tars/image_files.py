"""Displayed size and pixels of encoded images. Every decoder failure is an `ImageError`.

The size is read from the header (PNG and JPEG here, other formats with Pillow) and includes the EXIF orientation.
"""

import io
import struct
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from src.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

SUFFIXES = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif", "mpo"), "JPEG"),
    **dict.fromkeys(("png", "apng"), "PNG"),
    **dict.fromkeys(("tif", "tiff"), "TIFF"),
    **dict.fromkeys(("avif", "avifs"), "AVIF"),
    **dict.fromkeys(("jp2", "j2k", "jpx", "jpf", "jpc", "j2c"), "JPEG2000"),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
    **dict.fromkeys(("bmp", "dib"), "BMP"),
    "webp": "WEBP",
    "gif": "GIF",
}
"""File name suffixes of the supported formats, with Pillow's names."""
FORMATS = sorted(set(SUFFIXES.values()))
"""Formats that Pillow tries. Untested decoders, such as EPS, are never used."""
MAX_PIXELS = 40_000_000
"""Larger images are refused before decoding. The limit is recorded in the index."""
UNDECODABLE, TOO_LARGE = "an image cannot be decoded", "an image has too many pixels"
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))
"""JPEG markers without a length: TEM and RST0 to RST7."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers of frame headers, which contain the size (ITU-T T.81, B.2.2)."""
_APP1, _SCAN = 0xE1, 0xDA
_ORIENTATION = 0x0112
_QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262


class ImageError(DataError):
    """An image was not decoded. `reason` is UNDECODABLE or TOO_LARGE; the message adds details."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(f"{reason} ({details})")
        self.reason = reason


def open_image(content: bytes, max_pixels: int = MAX_PIXELS) -> "Image":
    """Decode an image as a viewer shows it: first frame, EXIF orientation applied, 8-bit RGB on white.
    Its `format` is one of FORMATS.

    Raises:
        ImageError: it has more than `max_pixels` pixels, or cannot be decoded for any reason.
    """

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(content, max_pixels) as image:
                image.load()
                turn = _turns().get(_orientation(image))
                rgb = _to_rgb(image)
                upright = rgb if turn is None else rgb.transpose(turn)
                upright.format = "JPEG" if image.format == "MPO" else image.format
                return upright
    except Exception as error:  # noqa: BLE001  decoders raise errors of any class on damaged content
        raise _refusal(error) from None


def image_size(data: memoryview, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Displayed width and height of an image, from its header.

    Raises:
        ImageError: it has more than `max_pixels` pixels, or is not an image.
    """
    for magic, read in _READERS:
        if bytes(data[: len(magic)]) == magic and (size := read(data)):
            return _check_pixels(size, max_pixels)
    return _pillow_size(data, max_pixels)


def _check_pixels(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    width, height = size
    if not width * height:
        raise ImageError(UNDECODABLE, f"{width} x {height} pixels")
    if width * height > max_pixels:
        raise ImageError(TOO_LARGE, f"{width} x {height}, and the index allows {max_pixels}")
    return size


def _open(content: bytes | memoryview, max_pixels: int) -> Any:
    """Open an image with Pillow, with its own pixel limit raised to `max_pixels`."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    _check_pixels(image.size, max_pixels)
    return image


def _refusal(error: Exception) -> ImageError:
    """Convert any decoder error to an ImageError."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, ImageError):
        return error
    if isinstance(error, UnidentifiedImageError):
        return ImageError(UNDECODABLE, f"not one of {', '.join(FORMATS)}")
    reason = TOO_LARGE if isinstance(error, Image.DecompressionBombError) else UNDECODABLE
    return ImageError(reason, " ".join(f"{type(error).__name__}: {error}".split())[:100])


def _png(data: memoryview) -> tuple[int, int] | None:
    """Size of a PNG from its header; None if it can have an orientation, so that Pillow must read it."""
    at, total = len(_PNG), len(data)
    size = None
    while at + 8 <= total:
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IHDR" and at + 16 <= total:
            size = struct.unpack(">II", data[at + 8 : at + 16])
        elif kind == b"eXIf" or (kind in (b"tEXt", b"zTXt", b"iTXt") and _is_orientation_text(data[at + 8 : at + 40])):
            return None
        elif kind == b"IEND":
            break
        at += 12 + length
    return size


def _is_orientation_text(start: memoryview) -> bool:
    return bytes(start).startswith((b"Raw profile type exif\0", b"XML:com.adobe.xmp\0", b"xmp\0", b"exif\0"))


def _jpeg(data: memoryview) -> tuple[int, int] | None:
    """Size of a JPEG from its header; None if it can have an orientation, so that Pillow must read it."""
    at, total = 2, len(data)
    size = None
    while at + 9 <= total:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
        elif marker == _SCAN:
            return size
        elif marker in _NO_LENGTH:
            at += 2
        else:
            length = struct.unpack(">H", data[at + 2 : at + 4])[0]
            if marker in _FRAMES:
                height, width = struct.unpack(">HH", data[at + 5 : at + 9])
                size = width, height
            elif marker == _APP1:
                segment = bytes(data[at + 4 : at + 2 + length])
                if b"\x01\x12" in segment or b"\x12\x01" in segment or b"rientation" in segment:
                    return None
            at += 2 + length
    return None


def _pillow_size(data: memoryview, max_pixels: int) -> tuple[int, int]:

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(data, max_pixels) as image:
                width, height = image.size
                is_turned = (
                    image.format != "TIFF" and _orientation(image) in _QUARTER_TURNS
                )  # Pillow turns a TIFF itself
                return (height, width) if is_turned else (width, height)
    except Exception as error:  # noqa: BLE001  decoders raise errors of any class on damaged content
        raise _refusal(error) from None


def _orientation(image: "Image") -> int:
    """EXIF orientation of an opened image, 1 by default. Damaged EXIF data are ignored, as viewers do."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  damaged EXIF data raise errors of any class
        return 1
    return value if isinstance(value, int) else 1


def _turns() -> dict[int, Any]:
    """Pillow's transposition for each EXIF orientation except 1."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }


def _to_rgb(image: Any) -> "Image":
    """Convert a decoded image to 8-bit RGB. Transparent pixels become white."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bits(image)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(image: Any) -> "np.ndarray":
    """Scale a grey image with more than 8 bits per pixel to (height, width) uint8, as viewers do.

    Raises:
        ImageError: the brightness range is undefined: signed or 32-bit integers, or floats outside 0 to 1.
    """
    import numpy as np

    pixels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode == "F":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise ImageError(UNDECODABLE, "floats outside 0 to 1")
        grey = (pixels * 255).round().astype(np.uint8)
    elif image.mode != "I" or image.format == "PPM":
        bits = tags.get(_TIFF_BITS, (16,))[0] if image.format == "TIFF" else 16
        grey = (pixels.astype(np.float32) * (255 / ((1 << bits) - 1))).round().clip(0, 255).astype(np.uint8)
    else:
        raise ImageError(UNDECODABLE, "signed or 32-bit integers")
    if tags.get(_TIFF_PHOTOMETRIC) == 0:  # WhiteIsZero, which Pillow applies to 8 bits only
        grey = 255 - grey
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(pixels == transparent, np.uint8(255), grey)
    return grey


_READERS: tuple[tuple[bytes, Callable[[memoryview], tuple[int, int] | None]], ...] = ((_PNG, _png), (_JPEG, _jpeg))
