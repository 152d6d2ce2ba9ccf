"""Describe a website by the first sentence of its Wikipedia page, found by host or by title."""

import re
import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from src.errors import DataError

Row = dict[str, Any]
COLUMNS = ("metadata_website_desc",)
MIN_WORDS, MAX_WORDS = 5, 50
_PARENTHESES = re.compile(r"\s*\((?:[^()]|\([^()]*\))*\)")
_SENTENCE = re.compile(
    r".*?(?<!\b[A-Z])[.!?][\"')\]]*(?=\s+[A-Z]|\s*$)", re.DOTALL
)  # a dot after a single letter is part of a name
_NO_DESCRIPTION = re.compile(r".* refers? to.?:|\[\[\w+:", re.DOTALL)


class Descriptions:
    """Index written by data_prep.metadata.wiki_index. Caches hosts, including those without a page."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if the file is not such an index."""
        try:
            self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            self._database.execute("select 1 from paragraphs, redirects limit 1")
        except sqlite3.Error as error:
            raise DataError(
                f"{path}: not an index of Wikipedia ({error}). Make it with python -m data_prep.metadata.wiki_index."
            ) from None
        self.queries = 0
        """Number of index queries."""
        self.of_host = lru_cache(1 << 16)(self._of_host)

    def _of_host(self, host: str) -> str | None:
        """Look up the first paragraph about a host, such as "bbc.co.uk"; None if it has no page."""
        title = self._redirect(host.lower()) or host.partition(".")[0].capitalize()
        return self._paragraph(title) or self._paragraph(self._redirect(title.lower()) or "")

    def _redirect(self, name: str) -> str | None:
        return self._ask("select title from redirects where name = ?", name)

    def _paragraph(self, title: str) -> str | None:
        return self._ask("select paragraph from paragraphs where title = ?", title)

    def _ask(self, query: str, value: str) -> str | None:
        self.queries += 1
        row = self._database.execute(query, (value,)).fetchone()
        return row[0] if row else None


@lru_cache(1)
def open_descriptions(path: str) -> Descriptions:
    """Open the index once per process."""
    return Descriptions(Path(path))


def extract(row: Mapping[str, Any], descriptions: Descriptions, compatible: bool = False) -> Row:
    """Make the column of a row with a "url".

    compatible: as the reference does, remove every "www." from the host and retain the port.
    """
    url = row.get("url")
    try:
        split = urlsplit(url if isinstance(url, str) else "")
        host = split.netloc.replace("www.", "") if compatible else (split.hostname or "").removeprefix("www.")
    except ValueError:  # such as brackets without an address
        host = ""
    paragraph = descriptions.of_host(host) if host else None
    value = first_sentence(paragraph) if paragraph else ""
    items = [{"key": "website_description", "type": "global", "value": value}] if value else []
    return {COLUMNS[0]: clean_descriptions(items, compatible)}


def first_sentence(paragraph: str) -> str:
    """First sentence of a paragraph, without text in parentheses."""
    text = _PARENTHESES.sub("", paragraph).strip()
    match = _SENTENCE.match(text)
    return match[0] if match else text


def clean_descriptions(items: Sequence[Row], compatible: bool = False) -> list[Row]:
    """Select the items that describe a website.

    compatible: as the reference does, return all items if the first one is a description, else none.
    """
    if compatible:
        return list(items) if items and describes(items[0]["value"]) else []
    return [item for item in items if describes(item["value"])]


def describes(value: str) -> bool:
    """Whether a text has 5 to 50 words, and is neither a disambiguation page nor a link."""
    return MIN_WORDS <= len(value.split()) <= MAX_WORDS and not _NO_DESCRIPTION.match(value)
