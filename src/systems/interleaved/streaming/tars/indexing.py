"""Build the index of a tar: group members into documents, check them, and count every member that is not read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from src.systems.interleaved.streaming.images import RESERVED
from src.systems.interleaved.streaming.tar_index import (
    APART,
    DOCUMENT,
    GOOD,
    IMAGE,
    INCOMPLETE,
    KINDS,
    LOST_IMAGES,
    METADATA,
    NO_CHAT,
    NO_FIELDS,
    NO_IMAGE,
    NO_TEXT,
    NOT_UTF8,
    OTHER,
    OTHER_IMAGES,
    PART,
    PROMPT,
    REASONS,
    SYSTEM,
    TEXT,
    TEXTS,
    TWICE,
    TarIndex,
    contents_of,
    kind_and_position,
)
from src.systems.interleaved.streaming.tars.fields import NO_NAME, FieldError, Fields
from src.systems.interleaved.streaming.tars.image_files import MAX_PIXELS, ImageError, image_size, open_image
from src.systems.interleaved.streaming.tars.members import scan, split_names
from src.systems.interleaved.streaming.tars.messages import ImagesError, MessagesError

if TYPE_CHECKING:
    import numpy as np

HIDDEN, UNKNOWN, NOT_IN_FIELDS = "a hidden file", "no known suffix", "not in --fields"
EMPTY_TEXT, SPELLS_IMAGES, NOT_IN_TAR = (
    "an empty text",
    f"a text that spells {RESERVED[1]}",
    "an image that is not in the tar",
)
"""Why a member of a good document is not read."""
_ORDER = {SYSTEM: 0, IMAGE: 1, PROMPT: 2, TEXT: 3}
_NO_NUMBER = 1 << 24
_MAX_SUFFIXES = 50
"""Maximum number of suffixes counted separately per reason; the rest are counted together."""


class _Part(NamedTuple):
    order: tuple[int, int, int]
    """Sort key within the document: (0, position, kind), or (1, kind, entry of the mapping)."""
    member: int
    """Number of its member within the document, in tar order."""
    kind: int
    data: int
    size: int
    pick: int = 0
    """See `Item.pick`."""


def build(
    tar: memoryview, fields: Fields | None = None, max_pixels: int = MAX_PIXELS, verify: bool = False
) -> TarIndex:
    """Build the index of a tar from its headers, its texts and the headers of its images.
    If the tar is cut, the index has the documents before the cut.

    fields: mapping of members with a kind that does not follow from the suffix.
    verify: decode each image once, and mark documents with an undecodable image as bad.
    """
    return _Builder(tar, fields, max_pixels, verify).build()


class _Builder:
    """Collects the documents, parts and counts of a tar."""

    def __init__(self, tar: memoryview, fields: Fields | None, max_pixels: int, verify: bool) -> None:
        self.tar, self.fields, self.max_pixels, self.verify = tar, fields, max_pixels, verify
        self.members = scan(tar)
        self.documents, self.parts = list[tuple[int, ...]](), list[tuple[int, ...]]()
        self.passed_over = dict[str, dict[str, list[int]]]()
        self.read, self.problems = [0, 0], list[str]()
        self.has_messages = bool(fields and fields.messages)
        self.field_counts = Counter[str]()
        self.roles = dict[str, tuple[tuple[int, int, int], int, str]]()

    def build(self) -> TarIndex:
        """Build the index of all members."""
        members, keys = self.members, split_names(self.members.names)
        for name, reason, size in members.lone:
            self._pass_over(reason, split_names([name])[0][1], size)
        name_ends = list[int]()
        for number, (key, ending) in enumerate(keys):
            if key.rpartition("/")[2]:
                name_ends.append(number)
            else:
                self._pass_over(HIDDEN, ending.rpartition(".")[2], members.sizes[number])
        begins = [i for i in range(len(name_ends)) if not i or keys[name_ends[i]][0] != keys[name_ends[i - 1]][0]]
        runs = Counter(keys[name_ends[begin]][0] for begin in begins)
        for begin, end in pairwise([*begins, len(name_ends)]):
            numbers = name_ends[begin:end]
            bad = APART if runs[keys[numbers[0]][0]] > 1 else GOOD
            self._add(
                numbers,
                [keys[number][1].lower() for number in numbers],
                bad,
                members.cut is not None and end == len(name_ends),
            )
        facts = {
            "bytes": len(self.tar),
            "members": len(members.names) + len(members.lone),
            "read": self.read,
            "passed_over": self.passed_over,
            "max_pixels": self.max_pixels,
            **({"cut": list(members.cut)} if members.cut else {}),
            **({"fields": self.fields.as_json(), "mapped": dict(self.field_counts)} if self.fields else {}),
            **({"verified": True} if self.verify else {}),
            **({"problems": self.problems} if self.problems else {}),
        }
        return TarIndex(_records(DOCUMENT, self.documents), _records(PART, self.parts), facts)

    def _add(self, numbers: Sequence[int], endings: Sequence[str], bad: int, last_before_cut: bool) -> None:
        """Add a document. numbers, endings: those of its members.
        bad: number of a known defect in REASONS."""
        members, parts, unread = self.members, list[_Part](), dict[int, str]()
        for place, (number, ending) in enumerate(zip(numbers, endings, strict=True)):
            order, kind, reason = self.roles.get(ending) or self._role(ending)
            if members.reasons[number]:
                unread[place] = members.reasons[number]
                bad = bad or (GOOD if kind == OTHER else INCOMPLETE)
                continue
            parts.append(_Part(order, place, kind, members.data[number], members.sizes[number]))
            if reason:
                unread[place] = reason
        bad = bad or self._names_defect(parts, numbers, endings, last_before_cut)
        lost_images = 0
        if self.fields:
            entries = {self.fields.members[ending] for ending in endings if ending in self.fields.members}
            if self.fields.json_members and not bad:
                try:
                    parts, lost_images = self._add_json(
                        self.fields, parts, endings, members.names[numbers[0]], unread, entries
                    )
                except (FieldError, MessagesError) as error:
                    bad = {FieldError: NO_FIELDS, MessagesError: NO_CHAT, ImagesError: OTHER_IMAGES}[type(error)]
                    self.problems = self.problems or [f"{members.names[numbers[0]]!a}: {error}"]
            self.field_counts.update(self.fields.entries[entry].text for entry in entries)
        parts.sort()
        if not bad:
            bad = self._texts_defect(parts, endings, unread)
        images = [part for part in parts if part.kind == IMAGE]
        sizes = dict[int, tuple[int, int]]()
        if not bad:
            bad, sizes = self._measure(images)
            bad = bad or (LOST_IMAGES if lost_images and not images else GOOD)
        self.documents.append((members.headers[numbers[0]], len(self.parts), len(parts), len(images), bad))
        for place, part in enumerate(parts):
            position = part.order[1] if part.order[0] == 0 else _NO_NUMBER + place
            self.parts.append((position, part.data, part.size, part.kind, part.pick, *sizes.get(id(part), (0, 0))))
        self._count(numbers, endings, unread, bad)
        for _ in range(0 if bad else lost_images):
            self._pass_over(NOT_IN_TAR, "json:", 0)

    def _count(self, numbers: Sequence[int], endings: Sequence[str], unread: Mapping[int, str], bad: int) -> None:
        """Count the members of a document as read, or as not read with a reason."""
        for place, number in enumerate(numbers):
            size = self.members.sizes[number]
            if bad or place in unread:
                self._pass_over(unread.get(place, REASONS[bad]), endings[place], size)
            else:
                self.read[0] += 1
                self.read[1] += size

    def _role(self, ending: str) -> tuple[tuple[int, int, int], int, str]:
        """Sort key, kind, and reason for not being read ("" if read) of a member, by its name after the key."""
        kind, position = kind_and_position(ending)
        rank = _ORDER.get(kind, len(_ORDER))
        order = (1, rank, 0) if position is None else (0, position, rank)
        reason = UNKNOWN if kind == OTHER else ""
        if self.fields:
            if (entry := self.fields.members.get(ending)) is not None:
                kind, reason = KINDS.index(self.fields.entries[entry].kind), ""
                order = (1, _ORDER[kind], entry)
            elif ending in self.fields.json_members:
                kind, reason = OTHER, ""
            elif KINDS[kind] in self.fields.kinds:
                kind, reason = OTHER, NOT_IN_FIELDS
        self.roles[ending] = order, kind, reason
        return order, kind, reason

    def _names_defect(
        self, parts: Sequence[_Part], numbers: Sequence[int], endings: Sequence[str], last_before_cut: bool
    ) -> int:
        """Check the names of the members of a document; returns the number of the defect in REASONS."""
        names = [self.members.names[number] for number in numbers]
        numbered_parts = [part for part in parts if part.order[0] == 0 and part.kind not in (OTHER, METADATA)]
        if len(set(names)) < len(names):
            return TWICE
        if len({part.order[1] for part in numbered_parts}) < len(
            numbered_parts
        ):  # only names without a kind share a position
            positions = Counter(
                (part.order[1], -1 if _has_kind(endings[part.member]) else part.kind) for part in numbered_parts
            )
            if max(positions.values()) > 1:
                return TWICE
        lists = [part for part in parts if part.kind == METADATA]
        if len(lists) > 1:
            return TWICE
        if not lists:
            needs_list = any(_has_kind(endings[part.member]) for part in numbered_parts)
            return INCOMPLETE if needs_list or last_before_cut else GOOD
        content = self._bytes(lists[0].data, lists[0].size)
        if content == "\n".join(names[:-1]).encode("utf-8", "surrogateescape") and len(names) > 1:
            return GOOD  # the format that this project writes
        listed_names = {
            name.rpartition("/")[2] for name in content.decode("utf-8", "surrogateescape").splitlines() if name
        }
        return GOOD if listed_names and listed_names <= {name.rpartition("/")[2] for name in names} else INCOMPLETE

    def _add_json(
        self,
        fields: Fields,
        parts: Sequence[_Part],
        endings: Sequence[str],
        name: str,
        unread: dict[int, str],
        entries: set[int],
    ) -> tuple[list[_Part], int]:
        """Add the parts that JSON members name; also returns the number of images that are not in the tar.

        name: of the first member. Removes the members of new parts from `unread`, and adds the used entries of the
        mapping to `entries`.
        """
        by_place = {part.member: part for part in parts}
        places = {ending: place for place, ending in enumerate(endings) if place in by_place}
        json_parts = {suffix: by_place[places[suffix]] for suffix in fields.json_members if suffix in places}
        contents = {suffix: self._bytes(part.data, part.size) for suffix, part in json_parts.items()}
        items, is_ordered = fields.items(contents)
        key = split_names([name.lower()])[0][0].rpartition("/")[2]
        entries.update(item.entry for item in items)
        images = self._find_images([item.name for item in items if item.name], places, key)
        if self.has_messages:
            in_tar = {place for ending, place in places.items() if kind_and_position(ending)[0] == IMAGE}
            missing = [name.replace(NO_NAME, "image ") for name, place in images.items() if place is None]
            if missing or not in_tar <= set(images.values()):
                raise ImagesError(f"{len(images)} images in messages, {len(in_tar)} in the tar; missing: {missing[:3]}")
        derived_parts, num_lost = list[_Part](), 0
        for i, item in enumerate(items):
            entry = fields.entries[item.entry]
            place = images[item.name] if item.name else places[entry.suffix]
            if place is None:
                num_lost += 1
                continue
            kind, member = KINDS.index(item.kind), by_place[place]
            order = (0, i, 0) if is_ordered else (1, _ORDER[kind], item.entry)
            derived_parts.append(_Part(order, place, kind, member.data, member.size, item.pick))
            unread.pop(place, None)
        return [*parts, *derived_parts], num_lost

    def _find_images(self, names: Sequence[str], places: Mapping[str, int], key: str) -> dict[str, int | None]:
        """Match each image name in a JSON to a member: by its name after the key or its file name. If none of the names
        is in the tar, numbered members match by their position. In messages, images without a name match by position.

        The number of a file at an address, such as https://example.org/1.jpg, is not that of a member.
        """
        matches, foreign = dict[str, int | None](), set[str]()
        for name in names:
            base = name.rpartition("/")[2].lower()
            if "://" in name and kind_and_position(base)[1] is not None:
                foreign.add(name)
            matches[name] = None if name in foreign else places.get(base, places.get(base.removeprefix(f"{key}.")))
        unknown = [name for name, place in matches.items() if place is None]
        if self.has_messages:
            unknown = [name for name in unknown if name[0] == NO_NAME or name in foreign]
        positions = [(kind_and_position(ending), place) for ending, place in places.items()]
        numbered_images = sorted(
            (-1 if position is None else position, place)
            for (kind, position), place in positions
            if kind == IMAGE and place not in matches.values() and (self.has_messages or position is not None)
        )
        if len(unknown) == len(numbered_images) and (self.has_messages or len(unknown) == len(matches)):
            matches.update(zip(unknown, (place for _, place in numbered_images), strict=True))
        return matches

    def _texts_defect(self, parts: Sequence[_Part], endings: Sequence[str], unread: dict[int, str]) -> int:
        """Check the texts of a document; returns the number of the defect in REASONS.
        Adds dropped texts to `unread`."""
        texts = [part for part in parts if part.kind in TEXTS]
        has_text = False
        try:
            for part, content in zip(texts, self._contents(texts), strict=True):
                reason = unread_text(content.decode("utf-8-sig"))
                has_text |= part.kind == TEXT and (not reason or (self.has_messages and reason == SPELLS_IMAGES))
                if self.has_messages:
                    continue
                if reason and part.pick:
                    self._pass_over(reason, f"{endings[part.member]}:", len(content))
                elif reason:
                    unread[part.member] = reason
        except FieldError:
            return NO_FIELDS
        except UnicodeDecodeError:
            return NOT_UTF8
        return GOOD if has_text else NO_TEXT

    def _measure(self, images: Sequence[_Part]) -> tuple[int, dict[int, tuple[int, int]]]:
        """Check the images of a document; returns the number of the defect in REASONS, and image sizes by `id`."""
        sizes = dict[int, tuple[int, int]]()
        try:
            contents = iter(self._contents([part for part in images if part.pick]))
            for part in images:
                content = memoryview(next(contents)) if part.pick else self.tar[part.data : part.data + part.size]
                size = sizes[id(part)] = image_size(content, self.max_pixels)
                if self.verify and open_image(bytes(content), self.max_pixels).size != size:
                    return NO_IMAGE, {}
        except ImageError as error:
            return REASONS.index(error.reason), {}
        except FieldError:
            return NO_FIELDS, {}
        return GOOD, sizes

    def _contents(self, parts: Sequence[_Part]) -> list[bytes]:
        if self.fields and any(part.pick for part in parts):
            return contents_of(
                self.fields,
                [(part.kind, part.data, part.size, part.pick) for part in parts],
                self._bytes,
                range(len(KINDS)),
            )
        return [self._bytes(part.data, part.size) for part in parts]

    def _bytes(self, offset: int, size: int) -> bytes:
        return bytes(self.tar[offset : offset + size])

    def _pass_over(self, reason: str, ending: str, size: int) -> None:
        """Count a member that is not read. ending: its name after the key."""
        first, _, rest = ending.lower().partition(".")
        suffix = f".{rest if rest and first.isdigit() else ending.lower()}" if ending else ""
        suffix = suffix.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        suffixes = self.passed_over.setdefault(reason, {})
        if suffix not in suffixes and len(suffixes) >= _MAX_SUFFIXES:
            suffix = "other suffixes"
        count = suffixes.setdefault(suffix, [0, 0])
        count[0] += 1
        count[1] += size


def _has_kind(ending: str) -> bool:
    """Whether a numbered name is POSITION.KIND.EXTENSION, as in vision/m4, where each position has one part."""
    return ending.count(".") == 2


def unread_text(text: str) -> str:
    """Why a text is dropped from its document; "" if it is read."""
    if "<" in text and any(token in text for token in RESERVED):
        return SPELLS_IMAGES
    return "" if text and not text.isspace() else EMPTY_TEXT


def _records(columns: Sequence[tuple[str, str]], rows: Sequence[tuple[int, ...]]) -> "np.ndarray":
    import numpy as np

    records = np.empty(len(rows), dtype=list(columns))
    for (name, _), column in zip(columns, zip(*rows, strict=True), strict=False):
        records[name] = column
    return records
