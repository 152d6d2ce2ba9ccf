"""Link entities in a text. A linker has one method, `link(text)`; the linker here looks mentions up in a dictionary.

To add another linker, such as REL or your own model, write a class with this method and add a line to
`extraction.EXTRACTORS`.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from src.errors import DataError
from src.files import reading

Row = dict[str, Any]
COLUMNS = ("metadata_entity",)
_WORD = re.compile(r"\w+(?:[.'’-]\w+)*")


class Linker(Protocol):
    """Finds the entities in a text."""

    def link(self, text: str) -> list[Row]:
        """Return items with key "entity" in order. Each has a span of `text` and a Wikipedia title with underscores."""
        ...


class DictionaryLinker:
    """Finds the longest dictionary mentions that start and end at word boundaries, without overlaps."""

    def __init__(self, titles: dict[str, str]) -> None:
        """titles: {mention as written in texts: title}."""
        self._titles = {mention: title.replace(" ", "_") for mention, title in titles.items()}
        self._longest = max((len(_WORD.findall(mention)) for mention in titles), default=0)

    def link(self, text: str) -> list[Row]:
        """See `Linker`."""
        words = [match.span() for match in _WORD.finditer(text)]
        mentions, at = list[Row](), 0
        while at < len(words):
            start, last = words[at][0], min(at + self._longest, len(words))
            ends = (end for end in range(last, at, -1) if text[start : words[end - 1][1]] in self._titles)
            if end := next(ends, 0):
                stop = words[end - 1][1]
                value = self._titles[text[start:stop]]
                mentions.append(
                    {"key": "entity", "type": "local", "char_start_idx": start, "char_end_idx": stop, "value": value}
                )
            at = end or at + 1
        return mentions


@lru_cache(1)
def read_linker(path: str) -> DictionaryLinker:
    """Load a linker from a file with a mention, a tab and a title on each line. Cached per process.

    Raises:
        DataError: the file is unreadable, or a line has another form or is not UTF-8.
    """
    titles = dict[str, str]()
    with reading(Path(path), DataError), open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as bad:
                problem = f"{bad.reason} at byte {bad.start} of the line"
                raise DataError(f"{path}:{number}: not UTF-8 text: {problem}. Convert the file to UTF-8.") from None
            mention, tab, title = line.partition("\t")
            if not tab or not mention or not title:
                raise DataError(f"{path}:{number}: expected a mention, a tab and a title, got {line!r}.")
            titles[mention] = title
    return DictionaryLinker(titles)


def extract(row: Row, linker: Linker) -> Row:
    """Make the column of a row with a "text"."""
    return {COLUMNS[0]: linker.link(row.get("text") or "")}
