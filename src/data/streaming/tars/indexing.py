"""Makes the index of a tar: groups members into documents, checks them, and counts every member that is not read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from src.data.streaming.images import RESERVED
from src.data.streaming.tar_index import (
    APART,
    DOCUMENT,
    GOOD,
    IMAGE,
    INCOMPLETE,
    KINDS,
    METADATA,
    NO_FIELDS,
    NO_IMAGE,
    NO_TEXT,
    NOT_UTF8,
    OTHER,
    PART,
    PROMPT,
    REASONS,
    TEXT,
    TWICE,
    TarIndex,
    contents_of,
    kind_and_position,
)
from src.data.streaming.tars.fields import FieldError, Fields
from src.data.streaming.tars.image_files import MOST_PIXELS, ImageError, image_size, open_image
from src.data.streaming.tars.members import scan, split_names

if TYPE_CHECKING:
    import numpy as np

HIDDEN, UNKNOWN, UNMAPPED = "a hidden file", "no known suffix", "not in --fields"
EMPTY_TEXT, SPELLS_IMAGES, NOT_IN_TAR = "an empty text", f"a text that spells {RESERVED[1]}", "an image that is not in the tar"
"""Why a member of a good document is not read."""
_ORDER = {IMAGE: 0, PROMPT: 1, TEXT: 2}
_UNNUMBERED = 1 << 24
_MOST_SUFFIXES = 50
"""Suffixes counted for each reason; the rest are counted together."""


class _Part(NamedTuple):
    order: tuple[int, ...]
    """Sort key in the document."""
    kind: int
    data: int
    size: int
    pick: int
    member: int
    """Number of the member, in the document."""


def build(tar: memoryview, fields: Fields | None = None, most_pixels: int = MOST_PIXELS, verify: bool = False) -> TarIndex:
    """The index of a tar, from its headers, its texts and the headers of its images. If the tar is cut: of the documents before the cut.

    fields: the mapping of members, if their suffixes do not say what they are.
    verify: decode each image once. Documents with an image that cannot be decoded are bad.
    """
    return _Builder(tar, fields, most_pixels, verify).build()


class _Builder:
    """Documents, parts and counts of a tar."""

    def __init__(self, tar: memoryview, fields: Fields | None, most_pixels: int, verify: bool) -> None:
        self.tar, self.fields, self.most_pixels, self.verify = tar, fields, most_pixels, verify
        self.members = scan(tar)
        self.documents, self.parts = list[tuple[int, ...]](), list[tuple[int, ...]]()
        self.passed_over = dict[str, dict[str, list[int]]]()
        self.read = [0, 0]
        self.mapped = Counter[str]()

    def build(self) -> TarIndex:
        """The index of all members."""
        members, keys = self.members, split_names(self.members.names)
        for name, reason, size in members.lone:
            self._pass_over(reason, split_names([name])[0][1], size)
        named = list[int]()
        for number, (key, ending) in enumerate(keys):
            if key.rpartition("/")[2]:
                named.append(number)
            else:
                self._pass_over(HIDDEN, ending.rpartition(".")[2], members.sizes[number])
        begins = [i for i in range(len(named)) if not i or keys[named[i]][0] != keys[named[i - 1]][0]]
        runs = Counter(keys[named[begin]][0] for begin in begins)
        for begin, end in pairwise([*begins, len(named)]):
            numbers = named[begin:end]
            bad = APART if runs[keys[numbers[0]][0]] > 1 else GOOD
            self._add(numbers, [keys[number][1].lower() for number in numbers], bad, members.cut is not None and end == len(named))
        facts = {
            "bytes": len(self.tar),
            "members": len(members.names) + len(members.lone),
            "read": self.read,
            "passed_over": self.passed_over,
            "most_pixels": self.most_pixels,
            **({"cut": list(members.cut)} if members.cut else {}),
            **({"fields": self.fields.as_json(), "mapped": dict(self.mapped)} if self.fields else {}),
            **({"verified": True} if self.verify else {}),
        }
        return TarIndex(_records(DOCUMENT, self.documents), _records(PART, self.parts), facts)

    def _add(self, numbers: Sequence[int], endings: Sequence[str], bad: int, last_before_cut: bool) -> None:
        """Add a document. numbers, endings: of its members. bad: the number in REASONS of what is already known to be wrong."""
        parts, unread = list[_Part](), dict[int, str]()
        for place, (number, ending) in enumerate(zip(numbers, endings, strict=True)):
            part, reason = self._part(place, number, ending)
            if self.members.reasons[number]:
                unread[place] = self.members.reasons[number]
                bad = bad or (GOOD if part.kind == OTHER else INCOMPLETE)
                continue
            parts.append(part)
            if reason:
                unread[place] = reason
        bad = bad or self._names_defect(parts, numbers, endings, last_before_cut)
        lost_images = 0
        if self.fields and self.fields.json_members and not bad:
            try:
                parts, lost_images = self._add_json(self.fields, parts, endings, self.members.names[numbers[0]], unread)
            except FieldError:
                bad = NO_FIELDS
        parts.sort()
        if not bad:
            bad = self._texts_defect(parts, endings, unread)
        sizes = [(0, 0)] * len(parts)
        if not bad:
            bad, sizes = self._measure(parts)
            bad = bad or (NO_IMAGE if lost_images and not any(part.kind == IMAGE for part in parts) else GOOD)
        kinds = [part.kind for part in parts]
        self.documents.append((self.members.headers[numbers[0]], len(self.parts), len(parts), kinds.count(IMAGE), bad))
        for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            position = part.order[1] if part.order[0] == 0 else _UNNUMBERED + place
            self.parts.append((position, part.data, part.size, part.kind, part.pick, *size))
        for place, (number, ending) in enumerate(zip(numbers, endings, strict=True)):
            size = self.members.sizes[number]
            if reason := unread.get(place, REASONS[bad]):
                self._pass_over(reason, ending, size)
            else:
                self.read = [self.read[0] + 1, self.read[1] + size]
        if lost_images and not bad:
            for _ in range(lost_images):
                self._pass_over(NOT_IN_TAR, "json:", 0)

    def _part(self, place: int, number: int, ending: str) -> tuple[_Part, str]:
        """A member as a part, and why it is not read, if so. place: in its document."""
        kind, position = kind_and_position(ending)
        order = (1, _ORDER.get(kind, len(_ORDER)), 0, place) if position is None else (0, position, _ORDER.get(kind, len(_ORDER)))
        reason = UNKNOWN if kind == OTHER else ""
        if self.fields:
            if (entry := self.fields.members.get(ending)) is not None:
                kind, reason = KINDS.index(self.fields.entries[entry].kind), ""
                order = (1, _ORDER[kind], entry, 0)
                self.mapped[self.fields.entries[entry].text] += 1
            elif KINDS[kind] in self.fields.kinds or ending in self.fields.json_members:
                kind, reason = OTHER, UNMAPPED
        return _Part(order, kind, self.members.data[number], self.members.sizes[number], 0, place), reason

    def _names_defect(self, parts: Sequence[_Part], numbers: Sequence[int], endings: Sequence[str], last_before_cut: bool) -> int:
        """Number in REASONS of what is wrong with a document by the names of its members."""
        names = [self.members.names[number] for number in numbers]
        numbered = [part for part in parts if part.order[0] == 0 and part.kind not in (OTHER, METADATA)]
        seen = Counter((part.order[1], -1 if _has_kind(endings[part.member]) else part.kind) for part in numbered)
        if len(set(names)) < len(names) or any(count > 1 for count in seen.values()):
            return TWICE
        lists = [part for part in parts if part.kind == METADATA]
        if len(lists) > 1:
            return TWICE
        if not lists:
            needs_list = any(_has_kind(endings[part.member]) for part in numbered)
            return INCOMPLETE if needs_list or last_before_cut else GOOD
        content = self._bytes(lists[0].data, lists[0].size)
        if content == "\n".join(names[:-1]).encode("utf-8", "surrogateescape") and len(names) > 1:
            return GOOD  # as this project writes it
        listed = {name.rpartition("/")[2] for name in content.decode("utf-8", "surrogateescape").splitlines() if name}
        return GOOD if listed and listed <= {name.rpartition("/")[2] for name in names} else INCOMPLETE

    def _add_json(
        self, fields: Fields, parts: Sequence[_Part], endings: Sequence[str], name: str, unread: dict[int, str]
    ) -> tuple[list[_Part], int]:
        """Parts with those that JSON members name, and how many images are not in the tar. name: of the first member."""
        by_place = {part.member: part for part in parts}
        places = {ending: place for place, ending in enumerate(endings) if place in by_place}
        contents = {suffix: self._bytes(*by_place[places[suffix]][2:4]) for suffix in fields.json_members if suffix in places}
        items, ordered = fields.items(contents)
        key = split_names([name.lower()])[0][0].rpartition("/")[2]
        for suffix in contents:
            unread.pop(places[suffix], None)
        for entry in {item.entry for item in items}:
            self.mapped[fields.entries[entry].text] += 1
        images = self._find_images([item.name for item in items if item.name], places, key)
        derived, lost = list[_Part](), 0
        for i, item in enumerate(items):
            entry = fields.entries[item.entry]
            place = images[item.name] if item.name else places[entry.suffix]
            if place is None:
                lost += 1
                continue
            kind, (_, _, data, size, *_) = KINDS.index(entry.kind), by_place[place]
            order = (0, i) if ordered else (1, _ORDER[kind], item.entry, item.place)
            derived.append(_Part(order, kind, data, size, item.pick, place))
            unread.pop(place, None)
        return [*parts, *derived], lost

    @staticmethod
    def _find_images(names: Sequence[str], places: Mapping[str, int], key: str) -> dict[str, int | None]:
        """The member that each name of an image in a JSON means: by the name after the key, by the file name, or by number."""
        found = dict[str, int | None]()
        for name in names:
            base = name.rpartition("/")[2].lower()
            found[name] = places.get(base, places.get(base.removeprefix(f"{key}.")))
        unknown = [name for name in found if found[name] is None]
        positions = [(kind_and_position(ending), place) for ending, place in places.items()]
        numbered = sorted((position, place) for (kind, position), place in positions if kind == IMAGE and position is not None)
        if len(unknown) == len(numbered):
            found.update(zip(unknown, (place for _, place in numbered), strict=True))
        return found

    def _texts_defect(self, parts: Sequence[_Part], endings: Sequence[str], unread: dict[int, str]) -> int:
        """Number in REASONS of what is wrong with the texts of a document. Texts that are not learned from are noted in `unread`."""
        try:
            records = [(part.kind, part.data, part.size, part.pick) for part in parts]
            contents = contents_of(self.fields, records, self._bytes, (TEXT, PROMPT))
            texts = [content.decode() for content in contents]
        except FieldError:
            return NO_FIELDS
        except UnicodeDecodeError:
            return NOT_UTF8
        has_text = False
        for part, text in zip(parts, texts, strict=True):
            if part.kind not in (TEXT, PROMPT):
                continue
            reason = unread_text(text)
            has_text |= part.kind == TEXT and not reason
            if reason and part.pick:
                self._pass_over(reason, f"{endings[part.member]}:", len(text.encode()))
            elif reason:
                unread[part.member] = reason
        return GOOD if has_text else NO_TEXT

    def _measure(self, parts: Sequence[_Part]) -> tuple[int, list[tuple[int, int]]]:
        """Number in REASONS of what is wrong with the images of a document, and the size of each, (0, 0) for other parts."""
        sizes = list[tuple[int, int]]()
        for part in parts:
            if part.kind != IMAGE:
                sizes.append((0, 0))
                continue
            content = self.tar[part.data : part.data + part.size]
            if part.pick and self.fields:
                try:
                    content = memoryview(self.fields.picked(bytes(content), [part.pick])[0])
                except FieldError:
                    return NO_FIELDS, [(0, 0)] * len(parts)
            try:
                sizes.append(image_size(content, self.most_pixels))
                is_bad = self.verify and open_image(bytes(content), self.most_pixels).size != sizes[-1]
            except ImageError as error:
                return REASONS.index(error.reason), [(0, 0)] * len(parts)
            if is_bad:
                return NO_IMAGE, [(0, 0)] * len(parts)
        return GOOD, sizes

    def _bytes(self, offset: int, size: int) -> bytes:
        return bytes(self.tar[offset : offset + size])

    def _pass_over(self, reason: str, ending: str, size: int) -> None:
        """Count a member that is not read. ending: its name after the key."""
        first, _, rest = ending.lower().partition(".")
        suffix = f".{rest if rest and first.isdigit() else ending.lower()}" if ending else ""
        suffix = suffix.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        suffixes = self.passed_over.setdefault(reason, {})
        if suffix not in suffixes and len(suffixes) >= _MOST_SUFFIXES:
            suffix = "other suffixes"
        count = suffixes.setdefault(suffix, [0, 0])
        count[0] += 1
        count[1] += size


def _has_kind(ending: str) -> bool:
    """Whether a numbered name is POSITION.KIND.EXTENSION, as in vision/m4, where a position is of one part."""
    return ending.count(".") == 2


def unread_text(text: str) -> str:
    """Why a text is left out of its document; "" if it is read."""
    return EMPTY_TEXT if not text.strip() else SPELLS_IMAGES if any(token in text for token in RESERVED) else ""


def _records(columns: Sequence[tuple[str, str]], rows: Sequence[tuple[int, ...]]) -> "np.ndarray":
    import numpy as np

    records = np.empty(len(rows), dtype=list(columns))
    for (name, _), column in zip(columns, zip(*rows, strict=True), strict=False):
        records[name] = column
    return records
