"""Decoding of images: what a viewer shows, in which size, and that damaged or huge ones are counted."""

import io
import random
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from src.systems.interleaved.streaming import tar_index
from src.systems.interleaved.streaming.tars import image_files
from src.systems.interleaved.streaming.tars.image_files import (
    TOO_LARGE,
    UNDECODABLE,
    ImageError,
    image_size,
    open_image,
)
from src.systems.interleaved.streaming.tars.indexing import build
from tests.systems.interleaved.streaming.images.fuzzed_images import damaged_images, originals
from tests.systems.interleaved.streaming.test_tar_index import tar_of


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def gradient(size: tuple[int, int] = (48, 32)) -> Image.Image:
    """Unlike itself in every orientation."""
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 30)], axis=2).astype(np.uint8))


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "a maker"
    return exif


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation_is_applied_as_transformers_does(kind: str, orientation: int):
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(gradient(), kind, exif=exif_of(orientation), **options)
    with Image.open(io.BytesIO(content)) as image:
        theirs = ImageOps.exif_transpose(image).convert("RGB")
    ours = open_image(content)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert ours.size == image_size(memoryview(content)) == ((32, 48) if orientation in (5, 6, 7, 8) else (48, 32))


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def test_orientation_is_found_wherever_it_is_written():
    """PNG: eXIf after the pixels, XMP; JPEG: XMP only, EXIF after the frame header."""
    png, jpeg, tiff = encoded(gradient(), "PNG"), encoded(gradient(), "JPEG"), exif_of(6).tobytes()[6:]
    after = png[:-12] + png_chunk(b"eXIf", tiff) + png[-12:]
    in_xmp = png[:33] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP) + png[33:]
    segment = b"http://ns.adobe.com/xap/1.0/\0" + XMP
    jpeg_xmp = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]
    segment = b"Exif\0\0" + tiff
    scan = jpeg.index(b"\xff\xda")
    late = jpeg[:scan] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[scan:]
    for content in (after, in_xmp, jpeg_xmp, late):
        assert open_image(content).size == image_size(memoryview(content)) == (32, 48)


def test_damaged_exif_is_ignored():
    content = encoded(gradient(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\x01\x12")
    assert open_image(content).size == image_size(memoryview(content)) == (48, 32)


def test_sizes_of_intact_images_are_those_of_their_pixels():
    for content in originals(random.Random(1)):
        try:
            size = open_image(content).size
        except ImageError:
            continue
        assert image_size(memoryview(content)) == size


def grey_tiff(pixels: np.ndarray, **tags: int) -> bytes:
    """A TIFF of one strip; tags: bits, sample_format, photometric."""
    tags = {"bits": pixels.dtype.itemsize * 8, "sample_format": 1, "photometric": 1} | tags
    data = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    values = [(256, pixels.shape[1]), (257, pixels.shape[0]), (258, tags["bits"]), (259, 1), (262, tags["photometric"])]
    values += [(273, 8), (277, 1), (278, pixels.shape[0]), (279, len(data)), (339, tags["sample_format"])]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(values)) + entries + bytes(4)


RAMP = np.linspace(0, 1, 64).reshape(8, 8)
GREYS = (RAMP * 255).round().astype(int)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (grey_tiff((RAMP * 65535).astype(np.uint16)), GREYS),
        (grey_tiff((RAMP * 65535).astype(np.uint16), photometric=0), 255 - GREYS),
        (grey_tiff(RAMP.astype(np.float32), sample_format=3), GREYS),
        (grey_tiff(RAMP.astype(np.float32), sample_format=3, photometric=0), 255 - GREYS),
        (encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "PNG"), GREYS),
        (encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "JPEG2000"), GREYS),
        (b"P5 8 8 65535\n" + (RAMP * 65535).astype(">u2").tobytes(), GREYS),
    ],
)
def test_deep_grey_images_are_shown_in_full_range(content: bytes, expected: np.ndarray):
    np.testing.assert_allclose(np.asarray(open_image(content))[:, :, 0], expected, atol=1)


@pytest.mark.parametrize(
    "content",
    [
        grey_tiff((RAMP * 300).astype(np.float32), sample_format=3),
        grey_tiff(np.full((8, 8), np.nan, np.float32), sample_format=3),
        grey_tiff((RAMP * 1e9).astype(np.uint32)),
        grey_tiff((RAMP * 9000 - 4000).astype(np.int16), sample_format=2),
    ],
)
def test_values_without_an_agreed_brightness_are_refused(content: bytes):
    with pytest.raises(ImageError) as error:
        open_image(content)
    assert error.value.reason == UNDECODABLE


def test_transparent_value_of_16_bits_is_white():
    pixels = np.full((8, 8), 1000, np.uint16)
    pixels[0] = 1001
    content = encoded(Image.fromarray(pixels), "PNG", transparency=1000)
    rgb = np.asarray(open_image(content))
    assert rgb[1:].min() == 255
    assert rgb[0].max() == 4


def huge_png(width: int, height: int) -> bytes:
    """A valid PNG of black pixels of a few kilobytes."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def test_decompression_bomb_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch):
    content = huge_png(8000, 5001)
    loads: list[Any] = []
    load = Image.Image.load
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: (loads.append(image), load(image))[1])
    with pytest.raises(ImageError) as error:
        open_image(content)
    assert error.value.reason == TOO_LARGE
    assert "8000 x 5001" in str(error.value)
    rotated_content = content[:33] + png_chunk(b"eXIf", exif_of(6).tobytes()[6:]) + content[33:]
    with pytest.raises(ImageError):
        image_size(memoryview(rotated_content))
    assert not loads


@pytest.mark.parametrize("verify", [False, True])
def test_index_and_training_refuse_the_same_images(verify: bool):
    """By the limit of the index, whose number it records."""
    tar = memoryview(tar_of([("1.png", huge_png(300, 200)), ("1.txt", b"a")]))
    for max_pixels, reason in ((60_000, ""), (59_999, TOO_LARGE)):
        index = build(tar, None, max_pixels, verify)
        assert index.max_pixels == max_pixels
        assert tar_index.REASONS[index.documents["bad"][0]] == reason


def test_only_the_limit_of_the_index_counts(monkeypatch: pytest.MonkeyPatch):
    """Pillow refuses more than twice its own limit."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for kind in ("PNG", "GIF"):
        content = encoded(gradient((100, 100)), kind)
        assert open_image(content, 10_000).size == image_size(memoryview(content), 10_000) == (100, 100)


def test_no_format_that_runs_programs_is_opened():
    assert not {"EPS", "WMF", "PDF"} & set(image_files.FORMATS)
    for content in (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg/>",
        b"",
        b"\xff\xd8\xff",
    ):
        with pytest.raises(ImageError) as error:
            open_image(content)
        assert error.value.reason == UNDECODABLE
        with pytest.raises(ImageError):
            image_size(memoryview(content))


def check_damaged(count: int, seed: int) -> tuple[int, int]:
    """Index damaged images with and without --verify, and decode those that are good; (decoded, refused)."""
    decoded = num_refused = 0
    batch = list(damaged_images(count, seed))
    tar = memoryview(
        tar_of([member for i, image in enumerate(batch) for member in ((f"{i}.jpg", image), (f"{i}.txt", b"a"))])
    )
    plain, verified_index = build(tar), build(tar, verify=True)
    assert len(plain) == len(verified_index) == count
    for number, content in enumerate(batch):
        good = not verified_index.documents["bad"][number]
        assert not good or not plain.documents["bad"][number], "what can be decoded has a size"
        try:
            image = open_image(content)
        except ImageError:
            assert not good
            num_refused += 1
            continue
        decoded += 1
        if good:
            _, _, width, height = (
                int(verified_index.parts_of(number)[0][name]) for name in ("kind", "pick", "width", "height")
            )
            assert image.size == (width, height)
    return decoded, num_refused


@pytest.mark.parametrize(("count", "seed"), [(800, 0), pytest.param(20_000, 1, marks=pytest.mark.slow)])
def test_damaged_images_are_counted_and_never_raise(count: int, seed: int):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded, num_refused = check_damaged(count, seed)
    assert decoded > count // 8
    assert num_refused > count // 8


@pytest.mark.parametrize("suffix", sorted(image_files.SUFFIXES))
@pytest.mark.parametrize("upper", [False, True])
def test_every_supported_suffix_is_an_image(suffix: str, upper: bool):
    content = encoded(gradient(), image_files.SUFFIXES[suffix])
    name = f"1.{suffix.upper() if upper else suffix}"
    indexed = build(memoryview(tar_of([(name, content), ("1.txt", b"a")])), verify=True)
    assert indexed.documents[["images", "bad"]].tolist() == [(1, 0)]
    assert indexed.facts["passed_over"] == {}
