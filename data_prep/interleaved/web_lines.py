"""Read web pages as JSON lines, with their images as files in a folder, in the layouts of mmc4 and OBELICS.

An image file has the name in the row. If the row has only a URL, its name is the SHA-256 of the URL in hexadecimal
digits plus one of `ENDINGS`. Missing images are dropped from their pages.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_prep.crossattn.qa_releases import json_stream
from data_prep.interleaved.rows import ReaderOptions, Row, read_image, text_part
from data_prep.interleaved.write import Part
from src.data import jsonl
from src.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif")


def read_mmc4(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Read allenai/mmc4: "text_list" has sentences, "image_info" the index of the sentence after each image."""
    return _read(path, lambda row, where: _mmc4_parts(row, options, where))


def read_obelics(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Read HuggingFaceM4/OBELICS: at each position, either "texts" or "images" has a value, and the other has None."""
    return _read(path, lambda row, where: _obelics_parts(row, options, where))


def _read(path: Path, parts_of: Callable[[dict[str, Any], str], list[Part]]) -> Iterator[Row]:
    for where, row in json_stream.lines(path):
        yield Row(f"{int(where.rpartition(':')[2]):08}", parts_of(row, where))


def _mmc4_parts(row: dict[str, Any], options: ReaderOptions, where: str) -> list[Part]:
    texts: Any = row.get("text_list")
    infos: Any = row.get("image_info")
    jsonl.check_type(texts, list[str], f"{where}: text_list")
    jsonl.check_type(infos, list[dict], f"{where}: image_info")
    before: list[list[Part]] = [[] for _ in texts]
    for number, info in enumerate(infos):
        place, info_path = info.get("matched_text_index"), f"{where}: image_info[{number}]"
        if type(place) is not int or not 0 <= place < len(texts):
            raise DataError(
                f"{info_path}.matched_text_index: expected the index of one of {len(texts)} texts, got {place!r}."
            )
        name = info.get("image_name") or info.get("raw_url")
        jsonl.check_type(name, str, f"{info_path}.image_name")
        before[place].append(Part("image", _image(name, options, info_path)))
    return [part for images, text in zip(before, texts, strict=True) for part in [*images, text_part(text)]]


def _obelics_parts(row: dict[str, Any], options: ReaderOptions, where: str) -> list[Part]:
    texts: Any = row.get("texts")
    images: Any = row.get("images")
    for name, value in (("texts", texts), ("images", images)):
        jsonl.check_type(value, list, f"{where}: {name}")
    if len(texts) != len(images):
        raise DataError(
            f"{where}: {len(texts)} texts and {len(images)} images: expected equal lengths, and null in one of the two."
        )
    parts = list[Part]()
    for number, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise DataError(
                f"{where}: at place {number}, expected a text or an image, got {'neither' if text is None else 'both'}."
            )
        jsonl.check_type(
            image if text is None else text, str, f"{where}: {'images' if text is None else 'texts'}[{number}]"
        )
        parts.append(Part("image", _image(image, options, where)) if text is None else text_part(text))
    return parts


def _image(name: str, options: ReaderOptions, where: str) -> bytes:
    if "://" not in name:
        return read_image(name, options, where)
    digest = hashlib.sha256(name.encode()).hexdigest()
    return next(filter(None, (read_image(digest + ending, options, where) for ending in ENDINGS)), b"")
