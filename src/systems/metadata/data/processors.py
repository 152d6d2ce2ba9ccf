"""Write items of metadata as strings, byte for byte those of BigScience's metadata project.

Where markers are to be read back, `escape` adds backslashes inside them; without special characters the strings are the
same.
"""

import calendar
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal
from urllib.parse import unquote_plus, urlsplit

from pydantic import Field

from src.experiments.config import Config
from src.systems.metadata.data.annotations import Item, read_date

Markers = tuple[str, str]
"""Texts before and after a span."""
Address = Literal["whole", "host"]
ESCAPE = "\\"


class Separators(Config):
    """Separators of a prefix."""

    item: str = " | "
    """Between two items, and between the parts of one."""
    key_value: str = ": "
    """Between a key and its value."""
    prefix_end: str = " |||"
    """After the last item."""
    prefix_start: str = ""
    """Before the first item."""


class TagRule(Config):
    """Drop a tag, but not its text, if the length of the text is in a range."""

    tag: str = Field(min_length=1)
    """Name of the tag."""
    min_length: float = float("-inf")
    """Characters; inclusive."""
    max_length: float = float("inf")
    """Characters; both limits are inclusive."""


class HtmlFilter(Config):
    """Choice of tags and attributes."""

    attributes: list[str] | None = None
    """Names of the attributes to write; None for all."""
    exclude: list[TagRule] = []
    """Further tags to drop, by the length of their text."""
    min_length: float = float("-inf")
    """Drop tags with a text of `min_length` to `max_length` characters, except those in `exceptions`. By default no
    length is dropped."""
    max_length: float = float("-inf")
    """Upper end of that range."""
    exceptions: list[str] = []
    """Tags that `min_length` and `max_length` do not drop."""

    def accepts(self, tag: str, length: int) -> bool:
        """Whether to write a tag with a text of `length` characters."""
        if tag in self._rules and any(rule.min_length <= length <= rule.max_length for rule in self._rules[tag]):
            return False
        return tag in self.exceptions or not self.min_length <= length <= self.max_length

    @cached_property
    def _rules(self) -> dict[str, list[TagRule]]:
        return {rule.tag: [other for other in self.exclude if other.tag == rule.tag] for rule in self.exclude}


def global_text(item: Item, separators: Separators, address: Address = "whole") -> str:
    """Write an item for a prefix. address: the part of a URL to write."""
    if item.key == "timestamp":
        date = read_date(item.value)
        month = f"Month{separators.key_value}{calendar.month_name[date.month]}"
        return f"Year{separators.key_value}{date.year}{separators.item}{month}"
    if item.key == "url" and address == "host":
        return f"URL{separators.key_value}{_host(item.value)}"
    value = unquote_plus(item.value) if item.key == "url" else item.value
    return f"{_TITLES.get(item.key, item.key)}{separators.key_value}{value}"


_TITLES = {
    "title": "Title",
    "website_description": "Website Description",
    "datasource": "Datasource",
    "length": "Text Length",
}
PROMPT_TITLES = {"datasource": "Data source", "length": "Number of characters"}
"""Names of keys in a prompt, where they differ from a prefix."""


def _host(address: str) -> str:
    """Host without user and port; the address itself if it has no host."""
    try:
        return urlsplit(address if "//" in address else f"//{address}").hostname or address
    except ValueError:  # such as brackets without an address
        return address


def local_markers(
    item: Item, html: HtmlFilter, entity_position: Literal["beginning", "end"], escape: bool = False
) -> Markers | None:
    """Write the markers around the span of an item; None if a filter drops it.

    escape: put a backslash before characters of a value that would end it, so that a reader gets the same value back.
    """
    start, end = item.span
    if item.key == "html":
        if not html.accepts(item.value, end - start):
            return None
        attributes = [pair for pair in item.attributes if html.attributes is None or pair[0] in html.attributes]
        tag = re.sub(r"[\\> ]|\A/", _add_escape, item.value) if escape else item.value
        return f"<{tag}{''.join(f' {_attribute(name, value, escape)}' for name, value in attributes)}>", f"</{tag}>"
    value = (
        re.sub(r"[\\|]" if item.key == "entity_paragraph" else r"[\\\]]", _add_escape, item.value)
        if escape
        else item.value
    )
    name = value.replace("_", " ")
    if item.key == "entity":
        return "", f" [[{name}]]"
    if item.key == "entity_paragraph":
        return (f" |{name}|", "") if entity_position == "beginning" else ("", f" |{name}|")
    return f"[{item.key}: {value}]", f"[/{item.key}: {value}]"


def _add_escape(match: re.Match[str]) -> str:
    return ESCAPE + match[0]


def _attribute(name: str, value: str, escape: bool) -> str:
    """Write `name:value`. A value ends at `>`, or at a blank before the next `name:`."""
    if escape:
        name = re.sub(r"[\\:>]", _add_escape, name)
        value = re.sub(r"[\\>]| (?=[^ :]*:)", _add_escape, value)
    return f"{name}:{value}"


LOOKALIKES: Mapping[str, Callable[[str], re.Pattern[str]]] = {
    "html": lambda _: re.compile(r"</?[A-Za-z]"),
    "entity": lambda _: re.compile(r"\[\["),
    "entity_paragraph": lambda _: re.compile(r"\|(?=\S)"),
}


def lookalike(key: str) -> re.Pattern[str]:
    """Pattern of the text that looks like a marker of a key."""
    return LOOKALIKES.get(key, lambda key: re.compile(rf"\[/?{re.escape(key)}: "))(key)
