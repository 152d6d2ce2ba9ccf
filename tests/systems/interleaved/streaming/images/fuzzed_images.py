"""Damaged images of every format that Pillow writes here, from a seed: bits flipped, bytes cut, inserted, repeated, and
swapped headers."""

import io
import random
from collections.abc import Iterator

from PIL import Image, features

MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "TIFF": ("1", "L", "RGB", "RGBA", "CMYK", "I;16", "F", "I", "LAB"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "ICO": ("RGB", "RGBA"),
    "PPM": ("1", "L", "RGB"),
    **({"AVIF": ("RGB", "RGBA")} if features.check("avif") else {}),
    **({"JPEG2000": ("L", "RGB", "RGBA", "I;16")} if features.check("jpg_2000") else {}),
}


def originals(draw: random.Random) -> list[bytes]:
    """Intact images of every format and mode, some with EXIF data, and some animated."""
    contents = []
    for kind, modes in MODES.items():
        for mode in modes:
            size = draw.randint(9, 40), draw.randint(9, 40)
            noise = Image.frombytes("L", size, draw.randbytes(size[0] * size[1]))
            image = Image.new(mode, size) if mode in ("LAB", "I;16") else noise.convert(mode)
            exif = Image.Exif()
            exif[0x0112] = draw.randint(0, 9)
            more = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF") else {}
            for options in (
                {},
                more,
                *({"compression": name} for name in ("tiff_lzw", "tiff_adobe_deflate") if kind == "TIFF"),
            ):
                out = io.BytesIO()
                image.save(out, kind, **options)
                contents.append(out.getvalue())
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        out = io.BytesIO()
        frames = [Image.new("RGB", (12, 9), colour) for colour in ("red", "green", "blue")]
        frames[0].save(out, kind, save_all=True, append_images=frames[1:])
        contents.append(out.getvalue())
    return contents


def damaged_images(count: int, seed: int = 0) -> Iterator[bytes]:
    """Damaged images."""
    draw = random.Random(seed)
    intact = originals(draw)
    for number in range(count):
        content = bytearray(intact[number % len(intact)])
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = (
                min(int(draw.expovariate(1 / 60)), len(content) - 1)
                if draw.random() < 0.6
                else draw.randrange(len(content))
            )
            match draw.randrange(6):
                case 0 | 1:
                    content[place] ^= 1 << draw.randrange(8)
                case 2:
                    content[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 3:
                    del content[place : place + draw.randint(1, 20)]
                case 4:
                    content[place:place] = draw.randbytes(draw.randint(1, 20))
                case _:
                    other = draw.choice(intact)
                    content[place : place + 16] = other[place : place + 16]
            if not content:
                content = bytearray(b"\0")
        if draw.random() < 0.1:
            del content[draw.randrange(len(content)) :]
        yield bytes(content)
