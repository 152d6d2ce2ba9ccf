"""Read documents with metadata from rows: the table of known types, the checks of a row and the order of markers.

Rows have the layouts of BigScience's metadata project (bigscience-workshop/metadata). A row of version 1 has
"metadata", a list of items with their keys. A row of version 2 has a column "metadata_COLUMN" for each extractor, and
its items can omit the fields that the column
or the text implies: `compact_item`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from src.data.jsonl import check_text
from src.errors import DataError
from src.experiments.config import unknown_text

Kind = Literal["global", "local"]
PREFIX = "metadata_"


@dataclass(frozen=True)
class MetadataType:
    """The type of a column of version 2."""

    key: str
    kind: Kind
    """global: describes the document. local: describes a span of its text."""


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
_EMPTY_ATTRIBUTES = {"attrs": [], "values": []}
_COLUMN_OF: Mapping[tuple[str, str], str] = {(kind.key, kind.kind): column for column, kind in COLUMNS.items()}
KEYS = list(dict.fromkeys(kind.key for kind in COLUMNS.values()))


class Item(NamedTuple):
    """One piece of metadata."""

    key: str
    value: str
    start: int | None = None
    """Span in the text, half open; None for global metadata."""
    end: int | None = None
    start_place: int | None = None
    """Rank of the start marker among all markers of this key at that character, starts and ends; None without order."""
    end_place: int | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    """Names and values of the attributes of an HTML tag."""
    column: str = ""
    """Type for sampling: the column of version 2, also in a row of version 1; the key itself if it has no column."""

    @property
    def span(self) -> tuple[int, int]:
        """Start and end of a local item."""
        return self.start or 0, self.end or 0


@dataclass(frozen=True)
class Document:
    """A document."""

    text: str
    items: Sequence[Item] = ()

    @property
    def columns(self) -> list[str]:
        """Columns with an item, in the order of the row."""
        return list(dict.fromkeys(item.column for item in self.items))


def read_row(row: Mapping[str, Any], where: str, columns: Sequence[str] | None = None) -> Document:
    """Read the document of a row of either version.

    columns: names or keys of the columns to read, which a row of version 2 must have; None: all columns.

    Raises:
        DataError: the text or a column is missing, an item is malformed, or its span is not in the text. The message
            starts with `where`.
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
        fields = [
            (name, PREFIX + name) for name in names if columns is None or name in columns or key_of(name) in columns
        ]
    items = list[Item]()
    for column, field in fields:
        for number, raw in enumerate(_items(row[field], where, field)):
            try:
                items.append(_read_item(column, raw, text))
            except DataError as error:  # raised without the place, which costs time to format for each item
                raise DataError(f"{where}: {field}[{number}]{error}") from None
    if columns is not None:
        items = [item for item in items if item.column in columns or item.key in columns]
    return Document(text, tuple(_rank_markers(items, where)))


def _items(value: Any, where: str, field: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"{where}: field {field!r}: expected a list of items or null, got {value!r}.")
    return value


def _read_item(column: str | None, raw: Any, text: str) -> Item:
    if not isinstance(raw, dict):
        raise DataError(f": expected an item, got {raw!r}.")
    type_of_column = COLUMNS.get(column or "")
    raw = {name: field for name, field in raw.items() if field is not None}  # Parquet has null for a missing field
    key = raw.get("key", type_of_column.key if type_of_column else column)
    kind = raw.get("type", type_of_column.kind if type_of_column else None)
    value = raw["value"] if "value" in raw else _implied_value(column, raw, text)
    if not isinstance(key, str) or not key:
        raise DataError(f".key: expected text, got {key!r}.")
    if kind not in ("global", "local"):
        raise DataError(f".type: expected 'global' or 'local', got {kind!r}.")
    if type_of_column and key != type_of_column.key:
        raise DataError(f".key: items of this column are {type_of_column.key!r}, got {key!r}.")
    column = column or _COLUMN_OF.get((key, kind), key)
    if key in KEYS and (kind != type_of_column.kind if type_of_column else (key, kind) not in _COLUMN_OF):
        raise DataError(
            f".type: items of the key {key!r} are {'local' if kind == 'global' else 'global'} here, got {kind!r}."
        )
    if not isinstance(value, str):
        raise DataError(f".value: expected text, got {value!r}.")
    check_text(value, ".value")
    if key == "timestamp":
        read_date(value)
    if kind == "global":
        return Item(key, value, column=column)
    start, end = _index(raw, "char_start_idx"), _index(raw, "char_end_idx")
    if not start <= end <= len(text):
        raise DataError(f": the span [{start}, {end}) is not in the text of {len(text)} characters. Correct it.")
    start_place, end_place = (
        _index(raw, name) if name in raw else None for name in ("relative_start_pos", "relative_end_pos")
    )
    if (start_place is None) != (end_place is None):
        missing = "relative_start_pos" if start_place is None else "relative_end_pos"
        raise DataError(f".{missing}: missing, and the other side has a position. Write both or neither.")
    return Item(key, value, start, end, start_place, end_place, _attributes(raw.get("html_attrs")), column)


def _implied_value(column: str | None, raw: Mapping[str, Any], text: str) -> str | None:
    """The value that the text implies for an item; None for other columns and malformed spans."""
    if column == "generation_length_text":
        return str(len(text))
    start, end = raw.get("char_start_idx"), raw.get("char_end_idx")
    if column not in ("paragraph", "generation_length_sentence") or type(start) is not int or type(end) is not int:
        return None
    return text[start:end] if column == "paragraph" else str(end - start)


def compact_item(column: str, raw: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Drop the fields of an item that `read_row` derives from its column and the text."""
    type_of_column = COLUMNS.get(column)
    derived_fields = {
        "key": type_of_column.key if type_of_column else column,
        "type": type_of_column.kind if type_of_column else None,
        "value": _implied_value(column, raw, text),
        "html_attrs": _EMPTY_ATTRIBUTES,
    }
    return {name: value for name, value in raw.items() if name not in derived_fields or value != derived_fields[name]}


def key_of(column: str) -> str:
    """Key of a column's items; the column itself if it is unknown."""
    return COLUMNS[column].key if column in COLUMNS else column


def read_date(value: str) -> datetime:
    """Parse a date in ISO notation, with or without a time.
    A bare number is refused: it could be a year, a day or seconds.

    Raises:
        DataError: it is not a date.
    """
    try:
        if re.fullmatch(r"[\d.\s]*", value):
            raise ValueError
        return datetime.fromisoformat(value.strip())
    except ValueError:
        raise DataError(
            f".value: expected a date, such as 2018-12-10 or 2018-12-10T13:45:00.000Z, got {value!r}."
        ) from None


def _index(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or value < 0:
        raise DataError(f".{name}: expected a number from 0 on, got {value!r}.")
    return value


def _attributes(raw: Any) -> tuple[tuple[str, str], ...]:
    if raw is None:
        return ()
    names, values = (raw.get("attrs"), raw.get("values")) if isinstance(raw, dict) else (None, ())
    if names is values is None:
        return ()
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        raise DataError(f".html_attrs: expected lists 'attrs' and 'values' of one length, got {raw!r}.")
    return tuple([(str(name), "" if value is None else str(value)) for name, value in zip(names, values, strict=True)])


class _Side(NamedTuple):
    """The start or the end of an item, while markers are ranked."""

    number: int
    """Index of the item."""
    closes: bool
    place: int | None
    """As in the row."""
    span: tuple[int, int]

    @property
    def is_empty(self) -> bool:
        """Whether it belongs to an empty span."""
        return self.span[0] == self.span[1]


def _rank_markers(items: Sequence[Item], where: str) -> list[Item]:
    """Rank the markers of each key at each character by the row's relative positions.

    Starts and ends share one counter, or each side has a counter. Two equal positions at a character show the second
    layout.

    Raises:
        DataError: the order of two markers is ambiguous.
    """
    ordered_keys = {item.key for item in items if item.start_place is not None}
    sides = defaultdict[tuple[str, int], list[_Side]](list)
    for number, item in enumerate(items):
        if item.key in ordered_keys and item.start is not None and item.end is not None:
            sides[item.key, item.start].append(_Side(number, False, item.start_place, item.span))
            sides[item.key, item.end].append(_Side(number, True, item.end_place, item.span))
    ranked_items = list(items)
    for (_, character), group in sides.items():
        places = {side.place for side in group}
        if None not in places and len(places) == len(group):
            order = sorted(group, key=lambda side: side.place or 0)
        else:
            starts, ends = ([side for side in group if side.closes == closes] for closes in (False, True))
            order = _merge(*(_sort_side(side, items, f"{where}: character {character}") for side in (starts, ends)))
        for rank, side in enumerate(order):
            item = ranked_items[side.number]
            ranked_items[side.number] = (
                item._replace(end_place=rank) if side.closes else item._replace(start_place=rank)
            )
    return ranked_items


def _sort_side(sides: Sequence[_Side], items: Sequence[Item], where: str) -> list[_Side]:
    """Sort all starts or all ends at a character by position; equal positions so that spans nest.

    Entities of a paragraph with equal positions are in the order of the row: BigScience's counter restarts when the
    paragraph changes.
    """
    places = {side.place for side in sides}
    if len(sides) > 1 and None in places:
        raise DataError(
            f"{where}: {len(sides)} markers of the key {items[sides[0].number].key!r}, "
            "some without a position. Number all or none."
        )
    if sides and len(places) < len(sides) and items[sides[0].number].key == "entity_paragraph":
        return list(sides)
    order = sorted(sides, key=lambda side: (side.place or 0, -side.span[0] if side.closes else -side.span[1]))
    for one, other in pairwise(order):
        first, second = items[one.number], items[other.number]
        is_same = (first.value, first.attributes) == (second.value, second.attributes)
        if one.place == other.place and one.span == other.span and not is_same:
            raise DataError(
                f"{where}: {first.value!r} and {second.value!r} of the key {first.key!r} have the same span and the "
                f"same relative position "
                f"{one.place}. Number them."
            )
    return order


def _merge(starts: Sequence[_Side], ends: Sequence[_Side]) -> Iterator[_Side]:
    """Merge starts and ends at one character: a span ends as soon as it can, but not before its own start."""
    open_items, begin = set[int](), 0
    for end in ends:
        while end.is_empty and end.number not in open_items:
            open_items.add(starts[begin].number)
            yield starts[begin]
            begin += 1
        yield end
    yield from starts[begin:]
