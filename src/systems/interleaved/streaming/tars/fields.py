"""Mapping of member names to images, prompts and texts, for tars with other names than `tar_index` expects.

The index records the mapping, so that indexing and training agree.
"""

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from src.errors import DataError
from src.experiments.config import Config as StrictConfig
from src.support.parsing import parse_json
from src.systems.interleaved.streaming.tars.messages import parts_of

KINDS = ("image", "prompt", "text")
"""Kinds in the default order of a document's parts; lists in its JSON can set a different order."""
MESSAGES = "messages"
_ITEM_BITS = 24
_PLACE, _BASE64 = "matched_text_index", "image_base64"
_NAMES = ("image_name", "raw_url", "url")
"""Keys for the name of an image in a list of objects, as in mmc4."""
NO_NAME = "\0"
"""Start of the made-up name of an image without one in messages; its number follows."""


class FieldError(DataError):
    """The JSON of a document does not have the mapped values."""


class Entry(NamedTuple):
    """One member name of a mapping, or one value in a JSON member."""

    kind: str
    suffix: str
    """The member's name after the key and a dot, in lower case, such as "left.jpg"."""
    path: tuple[str, ...] | None
    """Keys and list positions in a JSON member; None: the member itself."""
    text: str
    """As written in the mapping."""


class Item(NamedTuple):
    """A part of a document, taken from its JSON."""

    entry: int
    """Number of its entry."""
    place: int
    """Index of the value in its list."""
    name: str
    """Name of an image that is another member; "" if the value itself is the content."""
    kind: str
    """"image", "prompt", "text" or "system"."""

    @property
    def pick(self) -> int:
        """Encoded entry and index of the value, for `Fields.read`; 0 if the part is another member."""
        return 0 if self.name else self.entry + 1 << _ITEM_BITS | self.place


class Fields(StrictConfig):
    """Member names by kind, such as {"image": ["input.jpg", "left.jpg"], "text": "json:caption"}.
    Absent kinds are identified by suffix.

    Names are given without the key and its dot. NAME:PATH is a value in a JSON member: a string, a number or a list of
    these.
    """

    image: str | list[str] = Field(default_factory=list)
    """Members that are images."""
    prompt: str | list[str] = Field(default_factory=list)
    """Text that a model reads without loss."""
    text: str | list[str] = Field(default_factory=list)
    """Text that a model learns to write."""
    messages: str | list[str] = Field(default_factory=list)
    """A conversation in JSON, such as "json:messages", instead of the other three; see `tars.messages`."""

    @model_validator(mode="after")
    def _is_complete(self) -> "Fields":
        entries = self.entries
        if not entries:
            raise ValueError(
                'expected at least one of image, prompt, text and messages, such as {"text": "json:caption"}'
            )
        if self.messages and (len(entries) > 1 or entries[0].path is None):
            raise ValueError('messages: expected one value, such as "json:messages", and no image, prompt or text')
        texts = [entry.text.lower() for entry in entries]
        for entry in entries:
            if not entry.suffix or entry.suffix.startswith(".") or entry.path == ("",):
                raise ValueError(f'{entry.kind}: expected a name such as "jpg" or "json:caption", got {entry.text!r}')
            if texts.count(entry.text.lower()) > 1:
                raise ValueError(f"{entry.kind}: duplicate {entry.text!r}. Remove one.")
        return self

    @cached_property
    def entries(self) -> list[Entry]:
        """All entries, images first."""
        entries = []
        for kind in (*KINDS, MESSAGES):
            names = getattr(self, kind)
            for name in [names] if isinstance(names, str) else names:
                suffix, colon, path = name.partition(":")
                entries.append(Entry(kind, suffix.lower(), tuple(path.split(".")) if colon else None, name))
        return entries

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds with an entry; their suffixes are ignored."""
        return frozenset((*KINDS, "system") if self.messages else (entry.kind for entry in self.entries))

    @cached_property
    def members(self) -> dict[str, int]:
        """Suffix of a member that is a part -> the number of its entry."""
        return {entry.suffix: number for number, entry in enumerate(self.entries) if entry.path is None}

    @cached_property
    def json_members(self) -> frozenset[str]:
        """Suffixes of JSON members that are read."""
        return frozenset(entry.suffix for entry in self.entries if entry.path is not None)

    def as_json(self) -> dict[str, list[str]]:
        """The mapping in a canonical form, for an index or a manifest."""
        kinds = sorted({entry.kind for entry in self.entries})
        return {kind: [entry.text for entry in self.entries if entry.kind == kind] for kind in kinds}

    def items(self, contents: Mapping[str, bytes]) -> tuple[list[Item], bool]:
        """Parts from JSON members, and whether the JSON defines their order.
        contents: content of the members by suffix.

        Raises:
            FieldError: a member is not JSON, or its values are inconsistent.
            MessagesError: the messages are not a conversation.
        """
        values = dict[int, list[Any]]()
        for number, entry in enumerate(self.entries):
            if entry.path is not None and entry.suffix in contents:
                values[number] = _values(contents[entry.suffix], entry)
        order = self._interleave(values)
        places = (
            [(number, place) for number in values for place in range(len(values[number]))] if order is None else order
        )
        return [item for pair in places if (item := self._item(*pair, values)) is not None], order is not None

    def _item(self, number: int, place: int, values: Mapping[int, list[Any]]) -> Item | None:
        entry, value = self.entries[number], values[number][place]
        if value is None:
            return None
        kind, value = value if entry.kind == MESSAGES else (entry.kind, value)
        if entry.kind == MESSAGES and isinstance(value, int):
            return Item(number, place, f"{NO_NAME}{value}", kind)
        if kind == "image":
            return Item(number, place, "" if _is_embedded(value) else _image_name(value, entry), kind)
        _check_text(value, entry)
        return Item(number, place, "", kind)

    def _interleave(self, values: Mapping[int, list[Any]]) -> list[tuple[int, int]] | None:
        """Merge a list of images and a list of texts, as OBELICS, mmc4 and Energon do, into (entry, index) pairs.
        None if the values are not two such lists."""
        if self.messages:
            return [(number, place) for number in values for place in range(len(values[number]))]
        images = [number for number in values if self.entries[number].kind == "image"]
        texts = [number for number in values if self.entries[number].kind == "text"]
        if len(images) != 1 or len(texts) != 1:
            return None
        (image,), (text,) = images, texts
        if values[image] and all(isinstance(value, dict) and _PLACE in value for value in values[image]):
            order = list[tuple[int, int]]()
            for place in range(len(values[text])):
                order += [(image, i) for i, value in enumerate(values[image]) if value[_PLACE] == place]
                order.append((text, place))
            if len(order) != len(values[image]) + len(values[text]):
                raise FieldError(
                    f"{self.entries[image].text}: {_PLACE} of an image: expected the place of one of the "
                    f"{len(values[text])} texts"
                )
            return order
        if None not in values[image] and None not in values[text]:
            return None
        if len(values[image]) != len(values[text]):
            raise FieldError(
                f"{self.entries[image].text} has {len(values[image])} items, "
                f"but {self.entries[text].text} has {len(values[text])}"
            )
        order = []
        for place, pair in enumerate(zip(values[image], values[text], strict=True)):
            if None not in pair:
                raise FieldError(f"{self.entries[image].text} and {self.entries[text].text} both have item {place}")
            order += [(number, place) for number, value in zip((image, text), pair, strict=True) if value is not None]
        return order

    def read(self, content: bytes, picks: Sequence[int]) -> list[bytes]:
        """Read the values with these `Item.pick` from a JSON member: texts as UTF-8, images decoded from base64.

        Raises:
            FieldError: a value is missing.
        """
        values = dict[int, list[Any]]()
        contents = []
        for pick in picks:
            number, item = (pick >> _ITEM_BITS) - 1, pick & (1 << _ITEM_BITS) - 1
            entry = self.entries[number]
            if number not in values:
                values[number] = _values(content, entry)
            if item >= len(values[number]):
                raise FieldError(f"{entry.text}: no item {item}")
            contents.append(_content(values[number][item], entry))
        return contents


def _values(content: bytes, entry: Entry) -> list[Any]:
    """The values of an entry in a JSON member; a single value as a list."""
    value = parse_json(content, entry.text, FieldError)
    for key in entry.path or ():
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return []
    values = value if isinstance(value, list) else [] if _is_missing(value) else [value]
    values = [None if _is_missing(item) else item for item in values]
    return parts_of(values, entry.text) if entry.kind == MESSAGES else values


def _is_missing(value: Any) -> bool:
    """Whether a value is null, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _check_text(value: Any, entry: Entry) -> None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise FieldError(f"{entry.text}: expected text, got {json.dumps(value)[:60]}")


def _is_embedded(value: Any) -> bool:
    """Whether an image is embedded in base64, not named."""
    return (isinstance(value, dict) and isinstance(value.get(_BASE64), str)) or (
        isinstance(value, str) and value.startswith("data:image/")
    )


def _image_name(value: Any, entry: Entry) -> str:
    name = next((value[key] for key in _NAMES if value.get(key)), None) if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise FieldError(f"{entry.text}: expected the name of an image, got {json.dumps(value)[:60]}")
    return name


def _content(value: Any, entry: Entry) -> bytes:
    kind, value = value if entry.kind == MESSAGES else (entry.kind, value)
    if kind != "image":
        _check_text(value, entry)
        try:
            return str(value).encode()
        except UnicodeEncodeError:
            raise FieldError(f"{entry.text}: a text has half of a surrogate pair") from None
    encoded = value[_BASE64] if isinstance(value, dict) else value.partition(",")[2] if isinstance(value, str) else ""
    try:
        return base64.b64decode(encoded)
    except (binascii.Error, ValueError, TypeError):
        raise FieldError(f"{entry.text}: an image is not in base64") from None
