"""Rows that the layout readers yield, one per document to write."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.interleaved.write import Part
from src.data.jsonl import check_type
from src.errors import DataError
from src.files import reading

MARKER = "<image>"
"""Placeholder of an image in a turn."""
QUESTION = "Question: {question}\nAnswer:"
INCOMPLETE, MARKERS = "incomplete", "its texts have other places for images than it has images"
"""Reasons to drop a row."""


@dataclass(frozen=True)
class ReaderOptions:
    """Options of the readers."""

    images: Path | None = None
    """Folder of image files."""
    question: str = QUESTION
    """Template of the text before an answer; contains {question}."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Counts of unread tar members by reason and suffix. Readers add to it."""


class Row(NamedTuple):
    """A document, or the reason why it is dropped. The part of a missing image has no content."""

    key: str
    """Unique in the file, without dots and slashes."""
    parts: Sequence[Part]
    left_out: str = ""


def text_part(text: str) -> Part:
    """A text part that counts in the loss."""
    return Part("text", text.encode())


def question_part(question: str, options: ReaderOptions) -> Part:
    """A question part, which is masked in the loss."""
    return Part("prompt", options.question.replace("{question}", question.strip()).encode())


def make_turns(key: str, images: Sequence[bytes], turns: Sequence[tuple[str, str]], options: ReaderOptions) -> Row:
    """Make a conversation of (question, answer) turns. Only answers count in the loss.

    All answers but the last end with a line end. Images replace `MARKER` in the texts, or precede the first turn.
    """
    texts = list[Part]()
    for number, (question, answer) in enumerate(turns, start=1):
        if question.strip():
            texts.append(question_part(question, options))
        if answer.strip():
            texts.append(text_part(answer.strip() + ("\n" if number < len(turns) else "")))
    marker = MARKER.encode()
    num_markers = sum(part.content.count(marker) for part in texts)
    if num_markers == 0:
        return Row(key, [*(Part("image", image) for image in images), *texts])
    if num_markers != len(images):
        return Row(key, [], MARKERS)
    parts, remaining = list[Part](), list(images)
    for part in texts:
        for place, content in enumerate(part.content.split(marker)):
            if place:
                parts.append(Part("image", remaining.pop(0)))
            if content.strip():
                parts.append(Part(part.kind, content))
    return Row(key, parts)


def read_image(name: Any, options: ReaderOptions, where: str) -> bytes:
    """Read an image file; b"" if it is missing. where: place of the row, for error messages.

    Raises:
        DataError: no folder of images is given, or the name is not text or leads out of it.
    """
    if options.images is None:
        raise DataError(f"{where}: its images are files. Name their folder with --images FOLDER.")
    check_type(name, str, f"{where}: the name of an image")
    path = options.images / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{where}: expected an image path inside {options.images}, got {name!r}.")
    with reading(path, DataError):
        # unlike Path.is_file, os.path.isfile is False for a name that is too long
        return path.read_bytes() if os.path.isfile(path) else b""
