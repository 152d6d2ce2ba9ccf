"""Documents with metadata as their rows have them: a table of the known types, and the checks of a row.

A row of version 1 has "metadata", a list of items that name their key. One of version 2 has a column "metadata_COLUMN" for each extractor,
whose items may leave the key to the column. Both are those of BigScience's metadata project (bigscience-workshop/metadata).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from src.config import unknown_text
from src.data.jsonl import check_text
from src.errors import DataError

Kind = Literal["global", "local"]
PREFIX = "metadata_"


@dataclass(frozen=True)
class MetadataType:
    """A column of version 2, and the key of its items."""

    key: str
    kind: Kind
    """global: of the whole text. local: of a span."""


COLUMNS: Mapping[str, MetadataType] = {
    "html": MetadataType("html", "local"),
    "entity": MetadataType("entity", "local"),
    "entity_paragraph": MetadataType("entity_paragraph", "local"),
    "paragraph": MetadataType("paragraph", "local"),
    "url": MetadataType("url", "global"),
    "timestamp": MetadataType("timestamp", "global"),
    "website_desc": MetadataType("website_description", "global"),
    "title": MetadataType("title", "global"),
    "generation_datasource": MetadataType("datasource", "global"),
    "generation_length_text": MetadataType("length", "global"),
    "generation_length_sentence": MetadataType("length", "local"),
}
_SIDES = ("start", "end")
_COLUMN_OF: Mapping[tuple[str, str], str] = {(kind.key, kind.kind): column for column, kind in COLUMNS.items()}
KEYS = list(dict.fromkeys(kind.key for kind in COLUMNS.values()))


class Item(NamedTuple):
    """One piece of metadata."""

    key: str
    value: str
    start: int | None = None
    """Its span in the text, half open; None for global metadata."""
    end: int | None = None
    start_place: int | None = None
    """Place of its start marker among all markers, of starts and of ends, at that character."""
    end_place: int | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    """Names and values, of HTML tags."""
    column: str = ""
    """By which types are drawn: that of version 2, also in version 1; a key that has none there."""

    @property
    def span(self) -> tuple[int, int]:
        """Of a local item."""
        return self.start or 0, self.end or 0


@dataclass(frozen=True)
class Annotated:
    """A document."""

    text: str
    items: Sequence[Item] = ()

    @property
    def columns(self) -> list[str]:
        """Columns that have an item, in the order of the row."""
        return list(dict.fromkeys(item.column for item in self.items))


def read_row(row: Mapping[str, Any], where: str, columns: Sequence[str] | None = None) -> Annotated:
    """The document of a row of either version.

    columns: those that are read, by their names or their keys; a row of version 2 must have them. None: all that it has.

    Raises:
        DataError: the text is missing; a column is; an item is malformed, or its span is not in the text. The message begins with `where`.
    """
    text = row.get("text")
    if not isinstance(text, str):
        raise DataError(f"{where}: field 'text': expected text, got {text!r}.")
    check_text(text, f"{where}: field 'text'")
    if "metadata" in row:
        fields: list[tuple[str | None, str]] = [(None, "metadata")]
    else:
        names = [name.removeprefix(PREFIX) for name in row if name.startswith(PREFIX)]
        for name in columns or ():
            if name not in names and not any(key_of(column) == name for column in names):
                raise DataError(f"{where}: {unknown_text('column', name, names)} It is listed in data.columns.")
        fields = [(name, PREFIX + name) for name in names if columns is None or name in columns or key_of(name) in columns]
    items = list[Item]()
    for column, field in fields:
        for number, raw in enumerate(_items(row[field], where, field)):
            try:
                items.append(_read_item(column, raw, text))
            except DataError as error:  # said there without its place, which most items need not be told
                raise DataError(f"{where}: {field}[{number}]{error}") from None
    if columns is not None:
        items = [item for item in items if item.column in columns or item.key in columns]
    _check_places(items, where)
    return Annotated(text, tuple(items))


def _items(value: Any, where: str, field: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"{where}: field {field!r}: expected a list of items or null, got {value!r}.")
    return value


def _read_item(column: str | None, raw: Any, text: str) -> Item:
    if not isinstance(raw, dict):
        raise DataError(f": expected an item, got {raw!r}.")
    known = COLUMNS.get(column or "")
    key = raw.get("key", known.key if known else column)
    kind = raw.get("type", known.kind if known else None)
    value = raw.get("value")
    if not isinstance(key, str) or not key:
        raise DataError(f".key: expected text, got {key!r}.")
    if kind not in ("global", "local"):
        raise DataError(f".type: expected 'global' or 'local', got {kind!r}.")
    if known and key != known.key:
        raise DataError(f".key: items of this column are {known.key!r}, got {key!r}.")
    found = column or _COLUMN_OF.get((key, kind), key)
    if key in KEYS and (kind != known.kind if known else (key, kind) not in _COLUMN_OF):
        raise DataError(f".type: items of the key {key!r} are {'local' if kind == 'global' else 'global'} here, got {kind!r}.")
    if not isinstance(value, str):
        raise DataError(f".value: expected text, got {value!r}.")
    check_text(value, ".value")
    if key == "timestamp":
        read_date(value)
    if kind == "global":
        return Item(key, value, column=found)
    start, end = _index(raw, "char_start_idx"), _index(raw, "char_end_idx")
    if not start <= end <= len(text):
        raise DataError(f": the span [{start}, {end}) is not in the text of {len(text)} characters.")
    start_place, end_place = (None if raw.get(f"relative_{side}_pos") is None else _index(raw, f"relative_{side}_pos") for side in _SIDES)
    if (start_place is None) != (end_place is None):
        raise DataError(": of relative_start_pos and relative_end_pos there is only one.")
    return Item(key, value, start, end, start_place, end_place, _attributes(raw.get("html_attrs")), found)


def key_of(column: str) -> str:
    """The key of a column's items; the column itself where it is not known."""
    return COLUMNS[column].key if column in COLUMNS else column


def read_date(value: str) -> datetime:
    """A date in ISO's notation, with or without a time. A bare number is none: it could be a year, a day or seconds.

    Raises:
        DataError: it is none.
    """
    try:
        if re.fullmatch(r"[\d.\s]*", value):
            raise ValueError
        return datetime.fromisoformat(value.strip())
    except ValueError:
        raise DataError(f".value: expected a date, such as 2018-12-10 or 2018-12-10T13:45:00.000Z, got {value!r}.") from None


def _index(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or value < 0:
        raise DataError(f".{name}: expected a number from 0 on, got {value!r}.")
    return value


def _attributes(raw: Any) -> tuple[tuple[str, str], ...]:
    if raw is None:
        return ()
    names, values = (raw.get("attrs"), raw.get("values")) if isinstance(raw, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        raise DataError(f".html_attrs: expected lists 'attrs' and 'values' of one length, got {raw!r}.")
    return tuple([(str(name), str(value)) for name, value in zip(names, values, strict=True)])


def _check_places(items: Sequence[Item], where: str) -> None:
    """Of each key all local items have places or none, and no two markers have the same."""
    placed: dict[str, bool] = {}
    taken: dict[tuple[str, int, int], Item] = {}
    for item in items:
        if item.start is None:
            continue
        has = item.start_place is not None
        if placed.setdefault(item.key, has) != has:
            raise DataError(f"{where}: some items of the key {item.key!r} have relative positions, and some do not.")
        if has:
            start, end = item.span
            for index, place in ((start, item.start_place), (end, item.end_place)):
                other = taken.setdefault((item.key, index, place or 0), item)
                if other is not item or (start == end and item.start_place == item.end_place):
                    raise DataError(
                        f"{where}: {item.value!r} and {other.value!r} of the key {item.key!r} have the relative position {place} "
                        f"at character {index}."
                    )
