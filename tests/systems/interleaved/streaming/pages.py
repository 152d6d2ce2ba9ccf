"""Small tars of pages, whose texts and images tell which page they are of."""

import io
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.interleaved.write import Document, Part, Writing, write
from src.systems.interleaved.streaming.images import ImagesConfig
from src.systems.interleaved.streaming.manifest import Manifest
from src.systems.interleaved.streaming.texts import TextTokens

SIDE = 8
IMAGES: dict[str, Any] = {"frame_size": SIDE, "image_tokens": 1, "max_size": 2 * SIDE}
TOKENS = ImagesConfig(**IMAGES).special_tokens()


def colour(number: int) -> int:
    """The red of its images."""
    return number * 37 % 256


def picture(number: int, size: tuple[int, int] = (SIDE, SIDE), kind: str = "PNG") -> bytes:
    """An image of one colour, whose red tells the number; neighbours are far apart."""
    out = io.BytesIO()
    image = Image.new("RGB", size, (colour(number), number // 256 % 256, 77))
    image.save(out, kind)
    return out.getvalue()


def tokenizer(images: bool = True) -> Any:
    """Of bytes. images: with the tokens of images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    fast_tokenizer.add_special_tokens(
        {"extra_special_tokens": TOKENS if images else []}, replace_extra_special_tokens=False
    )
    return fast_tokenizer


def page(number: int, draw: random.Random, longest: int = 12, asking: bool = False) -> Document:
    """Texts and up to three images, which tell the number. asking: the end is an answer."""
    parts = [Part("text", f"{number} {'x' * draw.randint(0, longest)}".encode())]
    for _ in range(draw.randint(0, 3)):
        parts.append(Part("image", picture(number, draw.choice(((SIDE, SIDE), (2 * SIDE, SIDE)))), "png"))
        if draw.random() < 0.5:
            parts.append(Part("text", b"y" * draw.randint(1, longest)))
    parts += [Part("prompt", b"?")] if asking else []
    parts.append(Part("text", f"end {number}".encode()))
    return Document(f"{number:06}", parts)


def write_pages(
    folder: Path,
    count: int,
    source: str = "pages",
    *,
    per_shard: int = 25,
    seed: int = 0,
    with_counts: bool = True,
    asking: bool = False,
) -> Manifest:
    """Pages 0, 1, ... as tars. with_counts: store the counts of tokens in the indexes."""
    draw = random.Random(seed)
    texts = TextTokens(tokenizer()) if with_counts else None
    return write(
        folder,
        [page(i, draw, asking=asking) for i in range(count)],
        {"count": count, "seed": seed},
        Writing(per_shard, source, texts=texts),
    )


def damage(tar: Path, content: bytes | bytearray) -> None:
    """Change bytes of a tar as a bad disk does: its modification time stays."""
    times = tar.stat()
    tar.write_bytes(content)
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))


def config(sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A data set of these sources."""
    sizes = {"sequence_tokens": 80, "max_frames": 6, "open_rows": 3, "window": 40}
    return {"name": "streamed", "sources": sources, "images": IMAGES, **sizes, **more}


def numbers_of(text: str, documents: Sequence[int] = ()) -> list[int]:
    """The numbers that a row's text tells."""
    return [int(word) for word in text.split("end ")[1:] for word in word.split("<")[:1]]
