"""Rows that the readers of other layouts yield, one for each document to write."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data_prep.interleaved.write import Part
from src.errors import DataError
from src.files import reading

MARKER = "<image>"
"""Placeholder of an image in a turn."""
QUESTION = "Question: {question}\nAnswer:"
INCOMPLETE, MARKERS = "incomplete", "its texts have other places for images than it has images"
"""Why a row is left out."""


@dataclass(frozen=True)
class ReaderOptions:
    """Options of the readers."""

    images: Path | None = None
    """Folder of image files."""
    question: str = QUESTION
    """Text before an answer, which contains {question}."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Members of tars that no reader uses, by reason and suffix. Readers add to it."""


class Row(NamedTuple):
    """A document, or the reason why it is dropped. A missing image is a part without content."""

    key: str
    """Unique in its file, without dots and slashes."""
    parts: Sequence[Part]
    left_out: str = ""


def text_part(text: str) -> Part:
    """A text that is learned."""
    return Part("text", text.encode())


def question_part(question: str, options: ReaderOptions) -> Part:
    """A question as it is read, and not learned."""
    return Part("prompt", options.question.replace("{question}", question.strip()).encode())


def make_turns(key: str, images: Sequence[bytes], turns: Sequence[tuple[str, str]], options: ReaderOptions) -> Row:
    """A conversation of (question, answer): questions are read, answers are learned, with a line end except the last.

    The images replace `MARKER` in the texts, or precede the first turn.
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


def read_image(name: str, options: ReaderOptions, where: str) -> bytes:
    """The content of an image file; b"" where it is not there. where: of the row, in errors.

    Raises:
        DataError: there is no folder of images, or the name leads out of it.
    """
    if options.images is None:
        raise DataError(f"{where}: its images are files. Write --images FOLDER.")
    path = options.images / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{where}: the image {name!r} is not in {options.images}.")
    with reading(path, DataError):
        return path.read_bytes() if path.is_file() else b""
