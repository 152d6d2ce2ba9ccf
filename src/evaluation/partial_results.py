"""Texts that gather in a file, one on each line as JSON, so that what was interrupted goes on. The first line says what they are of."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.files import reading, write_atomic, writing


def begin(path: Path, facts: Mapping[str, Any], whole: Callable[[int], int]) -> list[str]:
    """The texts in `path`, if its first line says `facts`; else none, and it is begun anew. whole: how many texts there are -> to keep.

    Raises:
        RunError: the disk refuses.
    """
    try:
        with reading(path):
            lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        lines = []
    head = json.dumps(facts, sort_keys=True).encode()
    texts = list(_texts(lines[1:])) if lines and lines[0] == head else []
    del texts[whole(len(texts)) :]
    write_atomic(path, b"".join(line + b"\n" for line in (head, *(json.dumps(text).encode() for text in texts))))
    return texts


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    """Up to the first line that is no text in JSON: a power cut may leave such."""
    for line in lines:
        try:
            text = json.loads(line)
        except ValueError:
            return
        if not isinstance(text, str):
            return
        yield text


def add(path: Path, texts: Sequence[str]) -> None:
    """Add texts at the end.

    Raises:
        RunError: the disk refuses.
    """
    with writing(path), open(path, "ab") as file:
        file.write("".join(json.dumps(text) + "\n" for text in texts).encode())
