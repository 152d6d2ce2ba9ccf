"""What is written for a piece of metadata: the strings of BigScience's metadata project, byte for byte."""

import calendar
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal
from urllib.parse import unquote_plus, urlsplit

from pydantic import Field

from src.config import Config
from src.data.metadata.annotations import Item, read_date

Markers = tuple[str, str]
"""What is put before a span, and behind it."""
Address = Literal["whole", "host"]


class Separators(Config):
    """Between the items of a prefix."""

    item: str = " | "
    """Between two, and between the parts of one."""
    key_value: str = ": "
    prefix_end: str = " |||"
    """After the last."""
    prefix_start: str = ""
    """Before the first."""


class TagRule(Config):
    """A tag that is left out where its text is as long as this."""

    tag: str = Field(min_length=1)
    shortest: float = float("-inf")
    longest: float = float("inf")
    """Characters of its text, both included."""


class HtmlFilter(Config):
    """Which tags of a page are marked, and with which attributes."""

    attributes: list[str] | None = None
    """Names of those that are kept; None for all."""
    leave_out: list[TagRule] = []
    shortest: float = float("-inf")
    """Tags whose text has between `shortest` and `longest` characters are left out, but for those in `exceptions`."""
    longest: float = float("-inf")
    exceptions: list[str] = []

    def keeps(self, tag: str, length: int) -> bool:
        """Whether a tag with a text of `length` characters is marked."""
        if tag in self._rules and any(rule.shortest <= length <= rule.longest for rule in self._rules[tag]):
            return False
        return tag in self.exceptions or not self.shortest <= length <= self.longest

    @cached_property
    def _rules(self) -> dict[str, list[TagRule]]:
        return {rule.tag: [other for other in self.leave_out if other.tag == rule.tag] for rule in self.leave_out}


def global_text(item: Item, separators: Separators, address: Address = "whole") -> str:
    """What a prefix says of an item. address: how much of a URL."""
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
"""Where a prompt names a key otherwise than a prefix."""


def _host(address: str) -> str:
    """Without user and port; the address itself where no host can be found in it."""
    try:
        return urlsplit(address if "//" in address else f"//{address}").hostname or address
    except ValueError:  # such as brackets that hold no address
        return address


def local_markers(item: Item, html: HtmlFilter, entity_position: Literal["beginning", "end"]) -> Markers | None:
    """What is put around the span of an item; None where a filter leaves it out."""
    start, end = item.span
    name = item.value.replace("_", " ")
    if item.key == "html":
        if not html.keeps(item.value, end - start):
            return None
        attributes = [f" {key}:{value}" for key, value in item.attributes if html.attributes is None or key in html.attributes]
        return f"<{item.value}{''.join(attributes)}>", f"</{item.value}>"
    if item.key == "entity":
        return "", f" [[{name}]]"
    if item.key == "entity_paragraph":
        return (f" |{name}|", "") if entity_position == "beginning" else ("", f" |{name}|")
    return f"[{item.key}: {item.value}]", f"[/{item.key}: {item.value}]"


LOOKALIKES: Mapping[str, Callable[[str], re.Pattern[str]]] = {
    "html": lambda _: re.compile(r"</?[A-Za-z]"),
    "entity": lambda _: re.compile(r"\[\["),
    "entity_paragraph": lambda _: re.compile(r"\|(?=\S)"),
}


def lookalike(key: str) -> re.Pattern[str]:
    """What in a text could be taken for a marker of a key."""
    return LOOKALIKES.get(key, lambda key: re.compile(rf"\[/?{re.escape(key)}: "))(key)
